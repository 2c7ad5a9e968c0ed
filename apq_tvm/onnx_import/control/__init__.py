"""Control flow: bodies of nodes, branches and loops, and the flat graph they become."""
