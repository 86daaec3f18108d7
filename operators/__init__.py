"""C++ operators of our own for the CPU, and how they are built: optional, each beside a form in plain torch."""
