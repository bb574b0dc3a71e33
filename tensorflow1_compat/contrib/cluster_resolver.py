"""`tf.contrib.cluster_resolver`: finds the members of a training, by source of the information."""

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
