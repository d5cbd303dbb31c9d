"""What the tests say when Flax no longer has what is leaned on without a promise."""

import flax


def moved(what):
    """Gives the message for a failed assertion."""
    return (
        f"flax {flax.__version__} has moved {what}, which mixprec.linen and "
        "mixprec.scopes lean on: adapt them, or bound flax in pyproject.toml"
    )
