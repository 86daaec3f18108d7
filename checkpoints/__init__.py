"""Models and heads as they lie on the disk: found, checked, and streamed into networks. Imports models/ only."""
