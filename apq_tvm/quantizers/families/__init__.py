"""How codes are chosen by the weights alone, one file per family of formats."""
