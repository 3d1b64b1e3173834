# pirl with its tests' pinned versions. JAX brings the CUDA libraries; the driver comes from the host:
#   docker build -t pirl .                                   NVIDIA, driver 580 or newer
#   docker build -t pirl --build-arg ACCELERATOR=cuda12 .    NVIDIA, driver 525 or newer
#   docker build -t pirl --build-arg ACCELERATOR=cpu --build-arg BASE=ubuntu:24.04 .
#   docker run --rm --gpus all pirl                          what works here (pirl doctor)
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE}
ARG ACCELERATOR=cuda13

# Python, and what MuJoCo renders with where there is no screen.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv libegl1 libosmesa6 libgl1-mesa-dri \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 pirl \
    && install --directory --owner 10001 /work

COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY src /src/src
RUN python3 -m venv /opt/pirl \
    && /opt/pirl/bin/pip install --no-cache-dir --constraint /src/constraints.txt \
        "/src$(test "$ACCELERATOR" = cpu || echo "[$ACCELERATOR]")" \
    && rm -rf /src
ENV PATH=/opt/pirl/bin:$PATH

# Runs, datasets and checkpoints are mounted here: docker run -v "$PWD:/work" …
USER 10001
WORKDIR /work
RUN pirl doctor
ENTRYPOINT ["pirl"]
CMD ["doctor"]
