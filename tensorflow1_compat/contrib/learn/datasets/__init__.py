"""`tf.contrib.learn.datasets`: data sets as numpy arrays."""

from tensorflow1_compat.contrib.learn.datasets import base, mnist

Dataset, Datasets = base.Dataset, base.Datasets


def load_dataset(name, size="small", test_with_fake_data=False):
    """Loads the data set with a name; only "mnist" is available."""
    if name != "mnist":
        raise ValueError(f"load_dataset: {name!r} is not available here. Expected 'mnist'.")
    return mnist.load_mnist()
