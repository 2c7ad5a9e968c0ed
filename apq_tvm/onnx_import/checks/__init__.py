"""What a file says of its operators, checked before anything is computed or allocated from it."""
