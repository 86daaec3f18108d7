"""The one exception that stands for bad input."""


class InputError(ValueError):
    """Something the user gave cannot be honoured: a file, a field, an option.

    The message is one sentence that names what was given, what was expected, and what to change. Command lines
    print it on stderr and exit with code 2.
    """
