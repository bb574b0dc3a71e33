"""`tf.contrib.cluster_resolver`: classes that find the hosts of a cluster, one class for each kind of cluster."""

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
