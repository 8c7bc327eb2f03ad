"""Layers in the shape of `transformer_engine.pytorch`, on `accel.ops` and `accel.parallel`.

`accel.layers.stand_in` lists them under the names that Megatron-LM imports. Nothing here knows
Megatron.
"""
