"""What packed operands mean, for any instruction set."""
