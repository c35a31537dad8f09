"""Theano 1.0.5 as the host library. Only this folder imports Theano.

Importing this package imports no Theano: `import_support` must come before Theano does.

What is replaced in Theano, because it has no other way in (`tests/host/test_replaced.py` compares):

when Theano is imported, by `import_support`
    theano.gof.compilelock.lock                    short, quiet waits, without races
    theano.gof.compilelock.Unlocker.unlock         the same
    theano.tensor.blas._ldflags                    paths of a BLAS may have spaces
when a name of `synkhronos._host` is first used, by `faster` and `compiling`
    theano.gof.cc.CLinker.cmodule_key              a module that the master has sent needs no key
    theano.gof.op.Op.make_c_thunk                  which node such a module is for
    theano.gof.cmodule.ModuleCache._get_module     loads it
    theano.gof.cc.CLinker.cmodule_key_             operations without parameters have versions
    theano.gof.op.COp.c_code_cache_version         the same version in each process
    theano.gof.cmodule.KeyData.save_pkl            in one step, for processes that read meanwhile
    theano.gof.cmodule.KeyData.add_key             once more, after an attempt that has failed
    theano.gof.cmodule.ModuleCache.check_key       the cache may have been cleared
    theano.gof.cmodule.ModuleCache.refresh         another process may have cleaned it up, too
    theano.gof.destroyhandler._contains_cycle      looks at operations only
    theano.gof.destroyhandler._build_droot_impact  in plain dicts
    theano.gof.opt.MergeOptimizer.apply            has a set of pairs in place of a list
    theano.gof.cmodule.output_subprocess_Popen     compilers run at the same time
    theano.gof.vm.VM_Linker.make_all               the modules that these are to compile
    theano.printing.Print.perform                  the rank in front of what is printed
by the first block of `parallel`, by `dividing.intercept`: libraries keep `theano.function`
    theano.compile.pfunc.pfunc                     its code: calls become those of the next name
    theano.compile.pfunc.synkhronos_intercepted    the function that the block was given is called
    theano.compile.function.orig_function          in place of `pfunc` for inputs that are tuples
the class of objects that the script has already: so it sees no other objects than its own
    theano.gof.link.Container                      `base.cells`: tells when the value is set or read
    theano.compile.function_module.Function        `dividing.serial_functions`: tells of its calls
in a rank on an OpenCL device, by `device_arrays`: kernels that can't be built there, or are wrong
    theano.scalar.basic.Maximum.c_code             PoCL has no nan("")
    theano.scalar.basic.Minimum.c_code
    theano.scalar.basic.Maximum.c_code_cache_version
    theano.scalar.basic.Minimum.c_code_cache_version
    also the rewrites of `theano.gpuarray.opt`     `_NOT_ON_OPENCL`, and sums in half precision
in a rank on a CUDA device, by `device_arrays` and `cudnn`
    theano.gpuarray.elemwise.GpuCAReduceCuda.c_code_cache_version_apply     0 counted as no version
    theano.gof.type.CDataType.c_code_cache_version          with the version of cuDNN
    theano.gof.type.CDataType, theano.gpuarray.dnn.DnnBase, GpuDnnConvDesc: c_header_dirs,
    c_lib_dirs, c_compile_args                              this process's cuDNN, 8 or later
    theano.gpuarray.dnn.GpuDnnConv, GpuDnnConvGradW, GpuDnnConvGradI: load_c_code
                                                            asks for free memory only when needed
    theano.gpuarray.dnn.RNNBlock, GpuDnnRNNOp: __init__     refused, where cuDNN 9 has no such calls
"""
