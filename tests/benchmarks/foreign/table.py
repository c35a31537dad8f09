"""The foreign programs: where each file is, what it reads, and which of its lines are changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from benchmarks.foreign import data


@dataclass(frozen=True)
class Program:
    """A file of a clone, and how it is run.

    Attributes
    ----------
    name, file : str
        Its name in tables; the file below the folder of clones.
    make_data : callable, optional
        Writes into the program's folder what it reads.
    arguments : tuple of str
    shorter, other : tuple of (str, str)
        Words of the file, and what is put in their place: so that it runs for a shorter time; and
        for data of fewer rows, or for today's libraries.
    larger : tuple of (str, str)
        The same, after `shorter`, for a step in which computing dominates.
    is_python_2 : bool
        Whether lib2to3 converts it.
    beside : tuple of (str, str, str)
        Of other files in its folder: name, words, and what is put in their place.
    flags : str
        Of Theano, beside those of the environment.
    draws : bool
        Whether Theano's random numbers are drawn, which differ between ranks and serial Theano.
    figures : str
        A regular expression: what follows in a line is compared.
    """

    name: str
    file: str
    make_data: Callable | None = None
    arguments: tuple[str, ...] = ()
    shorter: tuple[tuple[str, str], ...] = ()
    other: tuple[tuple[str, str], ...] = ()
    larger: tuple[tuple[str, str], ...] = ()
    is_python_2: bool = False
    beside: tuple[tuple[str, str, str], ...] = ()
    flags: str = ""
    draws: bool = False
    figures: str = ".*"


def _tutorial(name, call, with_arguments, draws=False, make_data=data.mnist_pickle, **more):
    return Program(
        f"tutorials {name}",
        f"DeepLearningTutorials/code/{name}.py",
        make_data,
        shorter=((call, with_arguments),),
        draws=draws,
        figures=r"error|[Cc]ost|Train |F1|score",
        **more,
    )


_LOAD = (
    ("load.py", "'/media/datasets/'", "'.'"),
    ("load.py", "os.path.join(datasets_dir,'mnist/')", "datasets_dir"),
    ("load.py", "60000,28*28", "-1,28*28"),
    ("load.py", "(60000)", "(-1)"),
    ("load.py", "10000,28*28", "-1,28*28"),
    ("load.py", "(10000)", "(-1)"),
    ("load.py", "ntrain=60000", "ntrain=1280"),
)


def _newmu(name, n_epochs=2, **more):
    return Program(
        f"Newmu {name}",
        f"Newmu/{name}.py",
        data.mnist_files,
        shorter=(("range(100)", f"range({n_epochs})"),) if n_epochs else (),
        is_python_2=True,
        beside=_LOAD if n_epochs else (),
        **more,
    )


_LASAGNE = r"loss|accuracy|cost"


def _lasagne(name, *arguments, **more):
    file = "Lasagne/examples/mnist.py"
    return Program(name, file, data.mnist_files, arguments, figures=_LASAGNE, **more)


def _keras(name, *changes, make_data=data.of_keras, **more):
    return Program(
        f"keras {name}",
        f"keras/examples/{name}.py",
        make_data,
        shorter=changes,
        figures=r"val_loss: |^(?:IRNN )?[Tt]est|^Q |^\* Accuracy",
        **more,
    )


def _theanets(name, *changes, **more):
    return Program(
        f"theanets {name}",
        f"theanets/examples/{name}.py",
        data.mnist_pickle,
        shorter=changes,
        figures=r"loss=|predictions|output",
        **more,
    )


PROGRAMS = (
    _tutorial("logistic_sgd", "  sgd_optimization_mnist()", "  sgd_optimization_mnist(n_epochs=5)"),
    _tutorial("mlp", "    test_mlp()", "    test_mlp(n_epochs=2)"),
    _tutorial("convolutional_mlp", "    evaluate_lenet5()", "    evaluate_lenet5(n_epochs=2)"),
    _tutorial("dA", "    test_dA()", "    test_dA(training_epochs=2)", draws=True),
    _tutorial(
        "SdA", "    test_SdA()",
        "    test_SdA(pretraining_epochs=1, training_epochs=1, batch_size=20)", draws=True,
    ),
    _tutorial("rbm", "    test_rbm()", "    test_rbm(training_epochs=1, n_samples=1)", draws=True),
    _tutorial(
        "DBN", "    test_DBN()",
        "    test_DBN(pretraining_epochs=1, training_epochs=1)", draws=True,
    ),
    _tutorial("cA", "    test_cA()", "    test_cA(training_epochs=1)"),
    _tutorial("lstm", "max_epochs=100,", "max_epochs=2,", draws=True, make_data=data.imdb_pickle),
    _tutorial("rnnslu", "'nepochs': 60", "'nepochs': 2", make_data=data.atis),
    _tutorial("logistic_cg", "   cg_optimization_mnist()", "   cg_optimization_mnist(n_epochs=5)"),
    _newmu("0_multiply", 0),
    _newmu("1_linear_regression", 0),
    _newmu("2_logistic_regression", 4),
    _newmu(
        "3_net", 4,
        other=(
            ("from foxhound.utils.vis import grayscale_grid_vis, unit_scale", ""),
            ("from scipy.misc import imsave", ""),
        ),
    ),
    _newmu("4_modern_net", draws=True),
    _newmu("5_convolutional_net", draws=True, flags="floatX=float32"),
    _lasagne("Lasagne mnist mlp", "mlp", "2", draws=True),
    _lasagne("Lasagne mnist custom_mlp", "custom_mlp:2,400,0,0", "2"),
    _lasagne("Lasagne mnist cnn", "cnn", "1", draws=True),
    Program(
        "Lasagne recurrent", "Lasagne/examples/recurrent.py", figures=_LASAGNE,
        shorter=(("EPOCH_SIZE = 100", "EPOCH_SIZE = 10"), ("NUM_EPOCHS = 10", "NUM_EPOCHS = 2")),
        larger=(("N_HIDDEN = 100", "N_HIDDEN = 512"), ("N_BATCH = 100", "N_BATCH = 128")),
    ),
    Program(
        "Recipes lstm_text_generation", "Recipes/examples/lstm_text_generation.py", data.text,
        shorter=(
            ("PRINT_FREQ = 1000", "PRINT_FREQ = 5"), ("N_HIDDEN = 512", "N_HIDDEN = 64"),
            ("NUM_EPOCHS = 50", "NUM_EPOCHS = 0.2"),
        ),
        larger=(("N_HIDDEN = 64", "N_HIDDEN = 512"), ("NUM_EPOCHS = 0.2", "NUM_EPOCHS = 0.8")),
        other=(
            ("urllib.request.urlopen('https://s3.amazonaws.com/text-datasets/nietzsche.txt')",
             "open('text.txt', 'rb')"),
            ('.encode("utf-8")', ""),
            ("range(data_size * num_epochs / BATCH_SIZE)",
             "range(int(data_size * num_epochs / BATCH_SIZE))"),
        ),
        is_python_2=True, figures="loss|fox",
    ),
    Program(
        "Recipes variational_autoencoder",
        "Recipes/examples/variational_autoencoder/variational_autoencoder.py", data.mnist_files,
        ("--num_epochs", "1", "--n_hid", "256"), is_python_2=True, draws=True, figures=_LASAGNE,
    ),
    Program(
        "Recipes deep residual learning",
        "Recipes/papers/deep_residual_learning/Deep_Residual_Learning_CIFAR-10.py", data.cifar,
        ("1",), shorter=(("num_epochs=82", "num_epochs=1"),),
        other=(
            ("x[0:50000],axis=0", "x[0:3200],axis=0"), ("x[0:50000,:,:,:]", "x[0:1280,:,:,:]"),
            ("y[0:50000]", "y[0:1280]"), ("x[50000:,:,:,:]", "x[3200:,:,:,:]"),
            ("y[50000:]", "y[3200:]"), ("np.arange(100000)", "np.arange(2560)"),
            ("random_integers(0,high=8", "randint(0,high=9"),
        ),
        is_python_2=True, figures=_LASAGNE,
    ),
    Program(
        "Recipes densenet", "Recipes/papers/densenet/train_test.py", data.cifar_of_densenet,
        ("--depth", "10", "--epochs", "2", "--validate-test"), is_python_2=True,
        beside=(("cifar10.py", "(i + 1))) for i", "(i + 1)), allow_pickle=True) for i"),
                ("cifar10.py", "'test_batch'))", "'test_batch'), allow_pickle=True)")),
        figures=r"loss|error",
    ),
    _keras(
        "mnist_mlp", ("epochs = 20", "epochs = 2"), draws=True,
        other=(("reshape(60000, ", "reshape(-1, "), ("reshape(10000, ", "reshape(-1, ")),
    ),
    _keras("mnist_cnn", ("epochs = 12", "epochs = 1"), draws=True),
    _keras(
        "imdb_lstm", ("epochs=15", "epochs=1"), ("= 20000", "= 2000"),
        larger=(("batch_size = 32", "batch_size = 160"), ("epochs=1", "epochs=4")),
    ),
    _keras("imdb_bidirectional_lstm", ("epochs=4", "epochs=1"), ("= 20000", "= 2000"), draws=True),
    _keras("mnist_irnn", ("epochs = 200", "epochs = 1"), ("= 32", "= 192")),
    _keras("mnist_hierarchical_rnn", ("epochs = 5", "epochs = 1"), ("= 32", "= 192")),
    _keras(
        "addition_rnn", ("range(1, 200)", "range(1, 3)"),
        ("TRAINING_SIZE = 50000", "TRAINING_SIZE = 2000"),
    ),
    _keras(
        "cifar10_resnet", ("epochs = 200", "epochs = 1"), ("\nn = 3\n", "\nn = 1\n"),
        ("= True\nnum_classes", "= False\nnum_classes"), make_data=data.cifar_of_keras,
        other=(
            ("= cifar10.load_data()", "= [(x[:256], y[:256]) for x, y in cifar10.load_data()]"),
        ),
    ),
    _keras("reuters_mlp", draws=True),
    _keras("mnist_denoising_autoencoder", ("epochs=30", "epochs=1")),
    _keras("imdb_cnn", ("maxlen = 400", "maxlen = 100"), draws=True),
    _keras("mnist_siamese", ("epochs = 20", "epochs = 1"), draws=True),
    _theanets("mnist-classifier", ("train_batches=100", "train_batches=20, max_updates=100")),
    _theanets(
        "mnist-autoencoder", ("train_batches=100", "train_batches=20, max_updates=100"), draws=True,
    ),
    _theanets("recurrent-memory", ("monitor_gradients=True", "max_updates=60, train_batches=20")),
    _theanets("xor-classifier", ("patience=10", "patience=10, max_updates=100")),
)  # fmt: skip
