"""What spans several ranks: process groups come in as arguments, nothing here knows Megatron."""
