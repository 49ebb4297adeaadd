"""Whether the attached devices compute what they should, and how fast: the checks of the command `verify`."""
