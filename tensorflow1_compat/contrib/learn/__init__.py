"""`tf.contrib.learn`: predecessors of `tf.estimator`, their training loops, and data sets."""

import tensorflow.compat.v1 as tf
from tensorflow.compat.v1.estimator import Estimator
from tensorflow_estimator.python.estimator.inputs import numpy_io, pandas_io

from tensorflow1_compat.contrib.learn import datasets, learn_runner, monitors, utils
from tensorflow1_compat.contrib.learn.experiment import Experiment, RunConfig
from tensorflow1_compat.contrib.learn.models import (
    DNNClassifier,
    DNNLinearCombinedClassifier,
    DNNLinearCombinedRegressor,
    DNNRegressor,
    InputFnOps,
    LinearClassifier,
    LinearRegressor,
    MetricSpec,
    ModeKeys,
    ModelFnOps,
    PredictionKey,
    ProblemType,
    build_parsing_serving_input_fn,
    infer_real_valued_columns_from_input,
)
from tensorflow1_compat.contrib.learn.reading import read_batch_examples, read_batch_features
