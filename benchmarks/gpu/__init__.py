"""`make gpu`: build, prove and measure on a GPU, in one command of under nine minutes.

`__main__` runs the parts one after the other, each a process of its own with its own limit, so that
one that fails or hangs hides no other:

    build         the native kernels, and the carried wheels unpacked
    tests         the ops' contracts on the GPU: tests/triton, tests/cuda
    ceilings      what the device does at best: a large copy, a large matrix product
    ops           every op beside its peers
    triton_ops    Triton's kernels of the ops that have others in CUDA C++
    overlap       transfers of tensor parallelism under the products, the host as the other rank
    training      a Llama-3-8B-shaped GPT: stock Megatron-LM, presets fast and max
    moe           a DeepSeekMoE-shaped GPT: stock beside preset fast with grouped products
    memory        Llama with less memory: recomputation, swaps, a budget, the host's optimizer
    compiled_ops  what torch.compile makes of eager PyTorch's ops
    report        results.json and results.md

A part that is done for these sources is not done again: the command can be repeated until all are.
`make gpu-rehearsal` runs the same parts on a machine without a GPU, at toy sizes: it proves the
scripts, and measures nothing.
"""
