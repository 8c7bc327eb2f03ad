"""Where weights, optimizer states and activations lie, and in how many bytes. No Megatron here."""
