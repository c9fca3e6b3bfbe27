"""Wrong use, told apart from everything else that can go wrong."""


class WrongUse(ValueError):
    """Something was asked for that cannot be done; the message names the value, what was expected and what to do."""
