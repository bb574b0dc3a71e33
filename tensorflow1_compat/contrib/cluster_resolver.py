"""`tf.contrib.cluster_resolver`: who takes part in a training, by source of that knowledge."""

from tensorflow.compat.v1.distribute.cluster_resolver import (
    ClusterResolver,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    UnionResolver,
)

GceClusterResolver = GCEClusterResolver
UnionClusterResolver = UnionResolver
