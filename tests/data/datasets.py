from sample_datasets import *  # noqa: F403
