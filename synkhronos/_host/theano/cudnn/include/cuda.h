/* The types of CUDA's driver that libgpuarray's header names: Theano needs no more of CUDA, so its
   own headers, which few machines have, need not be installed. */
#ifndef SYNKHRONOS_CUDA_H
#define SYNKHRONOS_CUDA_H

typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef unsigned long long CUdeviceptr; /* on 64-bit machines, the only ones with cuDNN 8 and 9 */
typedef struct { char reserved[64]; } CUipcMemHandle;

#endif
