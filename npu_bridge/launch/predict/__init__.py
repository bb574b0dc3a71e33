"""`npu-run plan`: step times on n ranks, computed from a cost model of ring all-reduces, without TensorFlow."""
