"""A model file of 2017, as it is, from their launcher and configuration file, on CPU ranks."""

import os
import subprocess
import sys

import numpy as np
import pytest
from support.rules import FOR_ROOT

from synkhronos.rules import recorder

# For GPUs and Python 2, with what model files rely on: lists of map(), xrange, hickle, sync(), a
# number of batches that is a float, print_info without verbose, no current_info.
MODEL = """
import os

import hickle as hkl
import numpy as np
import theano
import theano.tensor as T
from theano.gpuarray.type import GpuArraySharedVariable

from theanompi.lib.opt import pre_model_iter_fn
from theanompi.models.data import Cifar10_data
from theanompi.models.layers2 import (Constant, Dropout, FC, Flatten, Normal, Softmax, Subtract,
                                      count_params, get_layers, get_params)


class ModelClass(object):

    def __init__(self, config):
        self.verbose, self.rank, self.size = config['verbose'], config['rank'], config['size']
        self.name = 'foreign'
        self.epoch, self.n_epochs, self.n_subb = 0, 2, 2
        self.mu, self.eta, self.use_momentum, self.use_nesterov_momentum = 0.9, 0.0001, True, False
        self.batch_size, self.file_batch_size = 16, 32
        self.data = Cifar10_data(verbose=self.verbose)
        self.data.batch_data(self.file_batch_size)
        self.data.extend_data(rank=self.rank, size=self.size)
        self.data.shuffle_data(mode='train', common_seed=1234)
        self.data.shard_data(mode='train', rank=self.rank, size=self.size)
        self.data.shuffle_data(mode='val', common_seed=1234)
        self.data.shard_data(mode='val', rank=self.rank, size=self.size)
        self.data.n_batch_train = self.data.n_batch_train * 1.0
        self.build()
        mean = 'mean_%d.hkl' % os.getpid()  # all asynchronous workers are told the rank 0
        hkl.dump(np.zeros(3), mean, mode='w')
        assert hkl.load(mean).shape == (3,)

    def build(self):
        self.x, self.y, self.lr = T.ftensor4('x'), T.lvector('y'), T.scalar('lr')
        shape = (self.batch_size, 3, 8, 8)  # each fourth pixel
        mean = self.data.rawdata[4][:, ::4, ::4] / np.float32(255)
        images = self.x[:, :, ::4, ::4] / np.float32(255)
        layer = Subtract(input=images, input_shape=shape, subtract_arr=mean)
        layer = Flatten(input=layer, axis=2)
        layer = FC(input=layer, n_out=16, W=Normal((192, 16), std=0.05),
                   b=Constant((16,), val=0.1), printinfo=self.verbose)
        layer = Dropout(input=layer, n_out=16, prob_drop=0.1)
        layer = Softmax(input=layer, n_out=10, W=Normal((16, 10), mean=0.0, std=0.1),
                        b=Constant((10,), val=0))
        self.cost = layer.negative_log_likelihood(self.y)
        self.error, self.error_top_5 = layer.errors(self.y), layer.errors_top_x(self.y)
        self.layers = filter(lambda each: len(each.params) > 0, get_layers(lastlayer=layer))
        self.params, self.weight_types = get_params(self.layers)
        assert len(map(lambda p: p.name, self.params)) == 4
        count_params(self.params, self.verbose)
        self.grads = T.grad(self.cost, self.params)
        self.shared_lr = theano.shared(np.float32(0.02))
        self.shared_x = theano.shared(np.zeros((32, 3, 32, 32), dtype=theano.config.floatX))
        self.shared_y = theano.shared(np.zeros((32,), dtype='int64'))
        self.subb_ind = ind = T.iscalar('subb')
        part = slice(ind * self.batch_size, (ind + 1) * self.batch_size)
        self.shared_x_slice, self.shared_y_slice = self.shared_x[part], self.shared_y[part]
        self.current_t, self.current_v, self.subb_t, self.subb_v = 0, 0, 0, 0

    def compile_train(self, *args):
        for arguments in args:
            self.compiled_train_fn_list.append(theano.function(**arguments))

    def compile_val(self):
        self.val_fn = theano.function(
            [self.subb_ind], [self.cost, self.error, self.error_top_5], updates=[],
            givens=[(self.x, self.shared_x_slice), (self.y, self.shared_y_slice)])

    def compile_iter_fns(self, *args, **kwargs):
        self.compiled_train_fn_list = []
        pre_model_iter_fn(self, self.size)

    def reset_iter(self, mode):
        if mode == 'train':
            self.current_t, self.subb_t = 0, 0
        else:
            self.current_v, self.subb_v = 0, 0

    def train_iter(self, count, recorder):
        if self.subb_t == 0:
            if self.current_t == 0:
                self.data.shuffle_data(mode='train', common_seed=self.epoch)
                self.data.shard_data(mode='train', rank=self.rank, size=self.size)
            recorder.start()
            self.shared_x.set_value(self.data.train_img_shard[self.current_t])
            self.shared_y.set_value(self.data.train_labels_shard[self.current_t])
            recorder.end('wait')
        recorder.start()
        for _ in xrange(1):
            cost, error = self.train_iter_fn(self.subb_t)
        for p in self.params:
            assert isinstance(p, GpuArraySharedVariable)
            p.container.value.sync()
        recorder.train_error(count, cost, error)
        recorder.end('calc')
        self.subb_t += 1
        if self.subb_t == self.n_subb:
            self.subb_t = 0
            self.current_t += 1

    def val_iter(self, count, recorder):
        if self.subb_v == 0:
            self.shared_x.set_value(self.data.val_img_shard[self.current_v])
            self.shared_y.set_value(self.data.val_labels_shard[self.current_v])
        Dropout.SetDropoutOff()
        cost, error, top5 = self.val_iter_fn(self.subb_v)
        Dropout.SetDropoutOn()
        recorder.val_error(count, cost, error, top5)
        self.subb_v += 1
        if self.subb_v == self.n_subb:
            self.subb_v = 0
            self.current_v += 1

    def adjust_hyperp(self, epoch):
        if epoch in [1]:
            self.shared_lr.set_value(np.float32(self.shared_lr.get_value() / 10))

    def print_info(self, recorder):
        if self.verbose:
            print('learning rate %f' % self.shared_lr.get_value())

    def cleanup(self):
        pass
"""
CFG = """# launch_session.cfg
RULE={rule}
MODELFILE=models.modelfile
MODELCLASS=ModelClass
DEVICES={devices}
PRINT_FREQ=2
MADE_BATCHES=8
"""


@pytest.mark.slow("trains in several processes")
@pytest.mark.parametrize("rule", ["BSP", "EASGD", "GOSGD"])
def test_a_model_file_trains_as_it_is(tmp_path, rule):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "modelfile.py").write_text(MODEL)
    (tmp_path / "launch_session.cfg").write_text(CFG.format(rule=rule, devices="cpu,cpu"))
    # Without a C compiler fused operations are computed item by item.
    flags = {"THEANO_FLAGS": "cxx=,floatX=float32,optimizer_excluding=fusion"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "synkhronos.rules.tmlauncher", "-cfg=launch_session.cfg"],
            cwd=tmp_path,
            env={**os.environ, **FOR_ROOT, **flags, "SYNKHRONOS_DATA": "made"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"no end: {late.stdout!r}\n{late.stderr.decode()}") from None
    assert done.returncode == 0, done.stdout + done.stderr
    rows = recorder.read(tmp_path / "inforec" / "inforec.pkl")
    assert len(rows["val_info"]) >= 2 and rows["lr"][0][1] > 0
    costs = [row[1] for row in rows["val_info"]]
    assert np.isfinite(costs).all() and costs[-1] < 2.3  # that of ten equal probabilities
    assert all(row[1] > 0 for row in rows["epoch_time"])
    assert "FC: (16, 192) -> (16, 16)" in done.stdout
    assert ("learning rate 0.0" in done.stdout) == (rule == "BSP")
    assert [*(tmp_path / "snapshots").glob("snapshot_*.npz")]
