"""What the tests say when Flax no longer has what is leaned on without a promise."""

import flax


def moved(what, users="mixprec.linen and mixprec.scopes"):
    """Gives the message for a failed assertion; `users` are the modules that lean."""
    return (
        f"flax {flax.__version__} has moved {what}, which {users} lean on: adapt them, "
        "or bound flax in pyproject.toml"
    )
