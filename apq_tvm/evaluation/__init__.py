"""How far quantized models are from their float models.

`simulate` runs a quantized model in torch without compiling it, `language` scores logits,
`layers` measures every layer on its own, `compare` brings these together.
"""
