"""Training draft heads: data from the target itself, EAGLE-1 and EAGLE-3 losses, a loop that can be killed."""
