"""Convolutions as linear layers, channels last; what stands between them in the same order."""
