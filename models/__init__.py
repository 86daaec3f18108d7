"""What a network is: configuration, layers, caches, draft heads. Imports torch and, of ours, operators."""
