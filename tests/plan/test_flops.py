"""Operations are counted as arithmetic says, also in loops, branches and gradients."""

import jax
import jax.numpy as jnp
import pytest

from pirl.plan.flops import count_flops


def flops(function, *shapes):
    return count_flops(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


def test_a_product_is_two_operations_for_each_pair_of_numbers():
    assert flops(jnp.matmul, (5, 7), (7, 3)) == 2 * 5 * 7 * 3
    assert flops(lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (4, 5, 7), (4, 3, 7)) == 4 * 2 * 5 * 7 * 3


def test_a_convolution_multiplies_every_output_by_its_window():
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert flops(convolve, (2, 8, 8, 3), (2, 2, 3, 16)) == 2 * (2 * 4 * 4 * 16) * (2 * 2 * 3)


@pytest.mark.parametrize("length", [1, 6])
def test_a_loop_counts_as_often_as_it_runs(length):
    """The compiler's own count does not, which is why there is this one."""

    def layers(x, weights):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    shapes = ((4, 8), (length, 8, 8))
    once = 2 * 4 * 8 * 8
    assert flops(layers, *shapes) == length * once
    twice = lambda x, weights: layers(layers(x, weights), weights)  # noqa: E731
    assert flops(twice, *shapes) == 2 * length * once
    nested = lambda x, weights: jax.lax.fori_loop(0, 3, lambda _, x: layers(x, weights), x)  # noqa: E731
    assert flops(nested, *shapes) == 3 * length * once


def test_a_gradient_is_two_more_products_and_recomputing_one_more():
    def loss(weights, x):
        for weight in weights:
            x = jnp.sin(x @ weight)
        return jnp.sum(x)

    shapes = ((3, 8, 8), (4, 8))
    forward = 3 * 2 * 4 * 8 * 8
    assert flops(loss, *shapes) == forward
    # Both by weights and by what came in, but not by the data.
    first = 2 * 4 * 8 * 8
    assert flops(jax.grad(loss), *shapes) == 3 * forward - first
    assert flops(jax.grad(jax.checkpoint(loss)), *shapes) == 4 * forward - first


def test_of_branches_the_dearest_counts():
    def either(flag, x, y):
        return jax.lax.cond(flag[0] > 0, lambda: x @ y, lambda: jnp.tanh(x @ (y @ y)))

    assert flops(either, (1,), (4, 8), (8, 8)) == 2 * 8 * 8 * 8 + 2 * 4 * 8 * 8


def test_a_compiled_call_inside_counts():
    assert flops(lambda x: jax.jit(jnp.matmul)(x, x), (6, 6)) == 2 * 6**3
