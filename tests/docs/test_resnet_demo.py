"""The ResNet demos: their model, their batch normalization, their images, and training."""

import functools
import importlib
import re
from collections import OrderedDict
from pathlib import Path

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T
from benchmarks.collectives import resnet50_shapes
from PIL import Image
from support import compiling, gallery
from support.layouts import Layout, forked
from theano import configparser
from theano.tensor.nnet.corr import BaseCorrMM

import synkhronos as synk
from synkhronos import session

DEMOS = Path(__file__).parents[2] / "demos"
TINY = ["--depth", "8", "--width", "2", "--size", "8", "--classes", "3"]


@pytest.fixture
def demo(monkeypatch):
    """Import a module of the demos; end the session if one of them fails to."""
    monkeypatch.syspath_prepend(str(DEMOS.parent))
    yield lambda name: importlib.import_module(f"demos.resnet.{name}")
    assert session._Current.session is None or session.close(), "the demo left its session open"


@pytest.fixture
def only_convolutions_compiled(quickly_compiled, monkeypatch):
    """Compile C code for convolutions only, which have no Python code."""
    compiling.always(monkeypatch, BaseCorrMM)


@pytest.fixture
def models(demo):
    return demo("models")


def test_resnet_50_has_the_parameters_of_the_paper(models):
    images = T.tensor4()
    with theano.change_flags(floatX="float32"):
        network = models.build_resnet(images)
    params = lasagne.layers.get_all_params(network, trainable=True)
    shapes = sorted(param.get_value(borrow=True).shape for param in params)
    assert len(shapes) == 161
    assert sum(np.prod(shape) for shape in shapes) == 25_557_032
    assert shapes == sorted(resnet50_shapes())
    assert network.output_shape == (None, 1000)
    # Mean and variance of each of the 53 convolutions are kept, but not trained.
    assert len(lasagne.layers.get_all_params(network, trainable=False)) == 2 * 53


@pytest.mark.parametrize("depth", [8, 20, 10, 26, 50])
def test_the_depth_counts_the_layers_with_weights(models, depth):
    network = models.build_resnet(T.tensor4(), depth, width=1, classes=2, size=32)
    convolutions = [
        layer.name
        for layer in lasagne.layers.get_all_layers(network)
        if isinstance(layer, models.ConvolutionLayer) and "shortcut" not in layer.name
    ]
    assert len(convolutions) + 1 == depth
    names = [param.name for param in lasagne.layers.get_all_params(network)]
    assert "stage2.block1.shortcut.norm.gamma" in names and len(set(names)) == len(names)


def test_a_depth_that_there_is_not_is_refused(models):
    with pytest.raises(ValueError, match=r"depth must be one of \[8, 10, .*\], got 51"):
        models.build_resnet(T.tensor4(), depth=51)


def normalization(models, **kwargs):
    """Return a layer with a scale and shift that are not 1 and 0, its input and its output."""
    x = T.tensor4("x", "float64")
    layer = models.BatchNormLayer((None, 2, 3, 3), **kwargs)
    layer.gamma.set_value(np.array([1.5, 0.5]))
    layer.beta.set_value(np.array([-1.0, 2.0]))
    layer.mean.set_value(np.array([0.5, -20.0]))
    statistics = OrderedDict()
    output = layer.get_output_for(x, statistics=statistics)
    return layer, x, output, statistics


@pytest.mark.parametrize("has_cudnn", [False, True])
def test_batch_normalization_is_that_of_the_paper(models, monkeypatch, has_cudnn):
    """Also where it is Theano's operation, which is computed by cuDNN on devices that have it."""
    monkeypatch.setattr(models, "has_cudnn", lambda: has_cudnn)
    layer, x, output, statistics = normalization(models)
    value = np.random.RandomState(0).normal(3, 2, (5, 2, 3, 3))
    mean, variance = value.mean((0, 2, 3)), value.var((0, 2, 3))
    before = layer.mean.get_value()

    def over(channels):
        return channels.reshape(1, 2, 1, 1)

    scale, shift = over(layer.gamma.get_value()), over(layer.beta.get_value())
    expected = scale * (value - over(mean)) / np.sqrt(over(variance) + 1e-5) + shift
    found = theano.function([x], output, updates=statistics, mode="FAST_COMPILE")(value)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_allclose(layer.mean.get_value(), 0.9 * before + 0.1 * mean)
    np.testing.assert_allclose(layer.variance.get_value(), 0.9 + 0.1 * variance)

    expected = (value - over(layer.mean.get_value())) / np.sqrt(
        over(layer.variance.get_value()) + 1e-5
    )
    deterministic = layer.get_output_for(x, deterministic=True)
    test = theano.function([x], deterministic, mode="FAST_COMPILE")
    np.testing.assert_allclose(test(value), scale * expected + shift, atol=1e-10)


@pytest.mark.parametrize("rows", [9, 7, 2])
@pytest.mark.sample(1)
def test_synchronized_normalization_and_its_gradients_are_those_of_all_rows(models, rows):
    value = np.random.RandomState(0).normal(3, 2, (rows, 2, 3, 3))
    with forked(Layout(3)):
        layer, x, output, statistics = normalization(models, synchronized=True)
        loss = T.sqr(T.tanh(output)).mean()
        params = [layer.gamma, layer.beta]
        grads = T.grad(loss, params)
        results = [loss, *map(synk.ops.all_reduce, grads), *statistics.values()]
        parallel = synk.function([x], results, mode="FAST_COMPILE")(value)
        serial = theano.function([x], results, mode="FAST_COMPILE")(value)
        for ours, theirs in zip(parallel, serial):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10)


@pytest.mark.usefixtures("only_convolutions_compiled")
@pytest.mark.slow("compiles a network of convolutions twice")
def test_synchronized_training_is_serial_training(demo, monkeypatch, capsys, tmp_path):
    # In single precision a rounded number may take a rectifier across zero, which changes more.
    monkeypatch.setattr(configparser, "THEANO_FLAGS", "floatX=float64")
    picture = tmp_path / "curves.png"
    found = demo("train_resnet").main(
        # 50 examples are minibatches of 21, 21 and 8 rows: ranks have 7, 2 or 3.
        ["--ranks", "3", "--batch", "7", "--examples", "50", "--epochs", "2", *TINY]
        + ["--synchronized", "--max-norm", "5", "--plot", str(picture)]
    )
    assert found["ranks"] == 3 and len(found["losses"]) == 2
    assert found["losses"] == pytest.approx(found["serial_losses"], rel=1e-9)
    assert found["accuracies"] == pytest.approx(found["serial_accuracies"])
    assert found["difference"] < 1e-8
    for ours, theirs in zip(found["kept"], found["serial_kept"]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9)
    assert found["replicas_equal"]  # with the running statistics
    assert picture.read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    assert gallery.unsaid("resnet/train_resnet", out) == []
    assert err == ""  # no progress bars where it is no terminal


def write_images(folder, counts, size=(20, 12)):
    """Write so many images of each class: of red, of green, of blue and noise."""
    random = np.random.RandomState(0)
    for label, count in enumerate(counts):
        path = folder / ["red", "green", "blue"][label]
        path.mkdir(parents=True)
        for number in range(count):
            pixels = random.randint(0, 50, (*size, 3))
            pixels[..., label] += 150
            suffix = ["png", "jpg"][number % 2]
            Image.fromarray(pixels.astype("uint8")).save(path / f"{number}.{suffix}")
    return folder


@pytest.mark.usefixtures("only_convolutions_compiled")
@pytest.mark.slow("compiles a network of convolutions")
def test_ranks_with_statistics_of_their_own_stay_alike(demo, tmp_path, capsys):
    folder = write_images(tmp_path / "images", [9, 10, 11])
    (folder / "red" / ".hidden").write_text("no image")
    tiny = [*TINY[:-2], "--images", str(folder), "--ranks", "2", "--no-compare"]
    found = demo("train_resnet").main(
        [*tiny, "--epochs", "6", "--batch", "4", "--rate", "0.02", "--warm-up", "0.5"]
    )
    assert found["classes"] == 3 and found["replicas_equal"]
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert {value.dtype.name for value in found["kept"]} == {"float32"}
    assert "speedup" not in capsys.readouterr().out
    assert theano.config.floatX == "float64"  # as before


@pytest.mark.usefixtures("only_convolutions_compiled")
@pytest.mark.slow("compiles a network of convolutions")
def test_serial_demo_trains_by_itself(demo, capsys):
    found = demo("train_resnet_theano").main(
        ["--examples", "24", "--batch", "8", "--epochs", "2", "--rate", "0.02", *TINY]
    )
    assert len(found["losses"]) == len(found["accuracies"]) == 2
    assert found["losses"][-1] < found["losses"][0]
    assert "Training Loss: " in capsys.readouterr().out


@pytest.mark.usefixtures("only_convolutions_compiled")
@pytest.mark.slow("compiles a network of convolutions")
def test_train_resnet_can_be_called_as_in_2017(demo, capsys):
    rule = functools.partial(lasagne.updates.adam, beta1=0.8)
    found = demo("train_resnet").train_resnet(
        batch_size=8,
        n_epoch=2,
        update_rule=rule,
        beta2=0.99,
        arguments=["--ranks", "2", "--examples", "16", *TINY],
    )
    assert len(found["losses"]) == 2 and found["accuracies"] == [] and found["replicas_equal"]
    assert "serial" not in capsys.readouterr().out


def test_images_are_cut_to_a_square_of_their_middle(demo, tmp_path):
    pixels = np.zeros((8, 24, 3), "uint8")
    pixels[:, 8:16] = (255, 0, 127)
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    image = demo("common").read_image(tmp_path / "wide.png", 4)
    assert image.shape == (3, 4, 4)
    for channel, value in zip(image, (2, -2, 0)):
        # Scaling down blurs the edges.
        np.testing.assert_allclose(channel[:, 1:3], value, atol=0.01)


def test_every_fifth_image_of_a_class_is_for_validation_and_examples_are_to_train_with(
    demo, tmp_path
):
    folder = write_images(tmp_path / "images", [2, 12])
    (train, valid), n_classes = demo("common").find_images(folder)
    assert n_classes == 2
    assert [label for _, label in train] == [0] * 9 + [1]  # green is before red
    assert [label for _, label in valid] == [0] * 3 + [1]
    assert not set(train) & set(valid)
    line = ["--images", str(folder), "--examples", "3", "--size", "4"]
    images = demo("common").load(demo("train_resnet_theano").parse(line), np.empty)
    assert (len(images.x), len(images.x_valid)) == (3, 4)


@pytest.mark.parametrize(
    ("counts", "classes", "said"),
    [
        (None, None, "is not a folder"),
        ([], None, "two or more; it has 0"),
        ([3], None, "two or more; it has 1"),
        ([3, 0], None, r"green must have two images.* it has 0"),
        ([3, 3], 3, "has 2 classes, not 3"),
    ],
)
def test_a_folder_without_images_is_refused(demo, tmp_path, counts, classes, said):
    if counts is not None:
        tmp_path.joinpath("images").mkdir()
        write_images(tmp_path / "images", counts)
    common = demo("common")
    with pytest.raises(common.NoImages, match=said):
        common.find_images(tmp_path / "images", classes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--depth", "51"], r"invalid choice: 51"),
        (["--rate", "0"], r"--rate: must be a number above zero, got '0'"),
        (["--max-norm", "-1"], r"--max-norm: must be a number above zero"),
        (["--warm-up", "inf"], r"--warm-up: must be a number of zero or more"),
        (["--classes", "1"], r"--classes: must be a whole number of at least 2"),
        (["--images", "{}", "--ranks", "2"], r"train_resnet: .*broken.png' can't be read as an"),
    ],
)
def test_wrong_arguments_end_in_a_sentence(demo, capsys, tmp_path, arguments, said):
    folder = write_images(tmp_path / "images", [2, 2])
    (folder / "green" / "broken.png").write_text("no image")
    with pytest.raises(SystemExit) as end:
        demo("train_resnet").main([text.format(folder) for text in arguments])
    assert end.value.code not in (0, None)
    assert re.search(said, f"{end.value.code} {capsys.readouterr().err}")
