"""How weights get small: int8 and int4 storage, operators and methods."""
