"""What a network is: configuration, layers, caches, and weights from disk. Imports torch and nothing of ours."""
