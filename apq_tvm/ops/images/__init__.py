"""What works on images and on windows of them, channels first or last."""
