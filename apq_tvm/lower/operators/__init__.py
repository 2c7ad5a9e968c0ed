"""How nodes become Relax: one short function per operator."""
