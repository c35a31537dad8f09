/* The types of CUDA's runtime that cuDNN's headers name: see cuda.h. */
#ifndef SYNKHRONOS_CUDA_RUNTIME_H
#define SYNKHRONOS_CUDA_RUNTIME_H

#include <stddef.h>

typedef struct CUstream_st *cudaStream_t;
typedef struct CUgraph_st *cudaGraph_t;

#define __LIBRARY_TYPES_H__ /* else cuDNN 8 declares this one too */
typedef enum libraryPropertyType_t { MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL } libraryPropertyType;

#endif
