"""Operations of JAX's own kind: one equation each, where a function would be dozens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend


def make(name: str, result_types: Callable[..., Any]) -> jax.extend.core.Primitive:
    """Makes a primitive, which is still to be lowered, batched and differentiated.

    Args:
      name: in the program.
      result_types: gives the types of all results from those of the arguments.
    """
    made = jax.extend.core.Primitive(name)
    made.multiple_results = True
    made.def_abstract_eval(result_types)

    @functools.cache
    def compiled(**options: Any) -> Any:
        return jax.jit(functools.partial(made.bind, **options))

    @made.def_impl
    def run(*args: Any, **options: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(**options)(*args)

    return made
