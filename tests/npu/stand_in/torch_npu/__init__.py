"""A torch-npu whose cards are the host, for programs that ask ``torch.cuda`` rather than compute."""

from types import SimpleNamespace

npu = SimpleNamespace(is_available=lambda: True)
