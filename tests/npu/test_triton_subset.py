"""The table of Triton kernels in docs/ascend.md is that of their source, and the scan sees what is wrong."""

from tests.npu import triton_subset


def test_the_table_in_the_docs_is_up_to_date():
    page = triton_subset.PAGE.read_text()
    assert triton_subset.BEGIN in page
    assert page == triton_subset.with_table(page), "run: python -m tests.npu.triton_subset"


def test_the_scan_sees_what_has_no_page(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(
        "@triton.jit\n"
        "def kernel(x, N: tl.constexpr):\n"
        "    a = tl.load(x + tl.arange(0, N), eviction_policy='evict_first')\n"
        "    tl.store(x, tl.philox(a.to(tl.uint32)) + libdevice.tanh(a))\n"
        "def launcher():\n"
        "    return tl.not_in_a_kernel\n"
    )
    assert triton_subset.findings(file) == {
        "names": {"philox"},
        "dtypes": {"uint32"},
        "hints": {"eviction_policy"},
        "libdevice": {"tanh"},
    }


def test_the_scan_follows_what_is_imported(tmp_path):
    (tmp_path / "base.py").write_text("@triton.jit\ndef helper(x):\n    return tl.philox(x)\n")
    file = tmp_path / "kernel.py"
    file.write_text("from accel._triton.base import helper\n")
    assert triton_subset.findings(file)["names"] == {"philox"}
