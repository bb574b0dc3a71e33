"""`npu-run plan`: computes step times on n ranks from a cost model of ring all-reduces; needs no TensorFlow."""
