"""Floating-point operations of a traced program: its matrix products and convolutions, loops gone through as often as
they run. (The compiler's own count takes the body of a loop once.)"""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def count_flops(jaxpr: Any) -> int:
    """Operations of all devices together. Of branches the dearest counts; a loop of unknown length counts once."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        return 2 * depth * math.prod(equation.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        kernel, features = equation.invars[1].aval.shape, parameters["dimension_numbers"].rhs_spec[0]
        depth = math.prod(kernel) // kernel[features]
        return 2 * depth * math.prod(equation.outvars[0].aval.shape)
    inner = [count_flops(jaxpr) for jaxpr in _inside(parameters)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (parameters["length"] if name == "scan" else 1)


def _inside(parameters: dict[str, Any]) -> Iterator[Any]:
    for value in parameters.values():
        for entry in value if isinstance(value, tuple | list) else (value,):
            if isinstance(entry, ClosedJaxpr | Jaxpr):
                yield entry
