"""Subclasses of modules' classes that nobody but Flax is to notice."""

import functools
from typing import Any

# In the namespace of what `subclass` makes, and not of what is derived from that.
_MADE = "_mixprec_made"
_QUIET = ("flax", "typing", "builtins")  # packages whose `__init_subclass__` is left


def subclass(
    cls: type,
    attributes: dict[str, Any],
    *,
    flax_base: type,
    metaclass: Any = None,
    **options: Any,
) -> Any:
    """Gives a subclass that looks like `cls`, with other attributes besides.

    What the author of `cls` does to subclasses, by `__init_subclass__`, is not done to
    this one: it is to be the same class, not one more for a registry.

    Args:
      cls: a subclass of `flax_base`.
      attributes: that the subclass has.
      flax_base: the class of Flax's whose `__init_subclass__` is called.
      metaclass: one derived from that of `cls`, or None for that itself.
      **options: for `__init_subclass__`.
    """
    names = ("__module__", "__qualname__", "__doc__")
    attributes = {name: getattr(cls, name) for name in names} | attributes
    attributes[_MADE] = True
    authors = {
        base.__module__.partition(".")[0]
        for base in cls.__mro__
        if "__init_subclass__" in vars(base)
    }
    bases = (cls,) if authors <= set(_QUIET) else (_past_authors(flax_base), cls)
    make = metaclass or type(cls)
    return make(cls.__name__, bases, attributes, **options)


@functools.cache
def _past_authors(flax_base: Any) -> type:
    def init_subclass(cls: Any, **options: Any) -> None:
        if _MADE in vars(cls):
            flax_base.__init_subclass__.__func__(cls, **options)
        else:
            super(past_authors, cls).__init_subclass__(**options)

    # NNX changes the class of an instance, which Python allows between classes of one
    # layout: this one is laid out as the first of Flax's whose instances have a dict.
    first = next(base for base in flax_base.__mro__[::-1] if "__dict__" in vars(base))
    attributes = {"__init_subclass__": classmethod(init_subclass)}
    past_authors = type(first)("PastAuthors", first.__bases__, attributes)
    return past_authors
