"""Lists the update rules, one file each. A new rule needs a new file and an entry in `ALL`."""

from __future__ import annotations

from npu_bridge.optimizers.rules.adadelta import Adadelta
from npu_bridge.optimizers.rules.adagrad import Adagrad
from npu_bridge.optimizers.rules.adam import Adam, AdamW
from npu_bridge.optimizers.rules.adamp import AdamP
from npu_bridge.optimizers.rules.bert_adam import BertAdam
from npu_bridge.optimizers.rules.lamb import LAMB
from npu_bridge.optimizers.rules.lars import LARS
from npu_bridge.optimizers.rules.rmsprop import RMSProp
from npu_bridge.optimizers.rules.sgd import SGD

ALL = (SGD, RMSProp, Adagrad, Adadelta, Adam, AdamW, LAMB, BertAdam, AdamP, LARS)
