/* cuDNN's header, with what Theano 1.0.5 needs of cuDNN 7 where that is cuDNN 8 or 9.

   Theano's C code   #include <cudnn.h>  -->  this file  -->  the header of the installed cuDNN
                     cudnnConvolution...(a, b)  -->  run()  -->  set_math(), cudnnConvolution...(a, b)

   Theano's calls stay as they are. Each convolution runs in the math type of its data type:

                     SYNKHRONOS_TF32 is 0     SYNKHRONOS_TF32 is 1
       float16       tensor cores             tensor cores
       float32       float32                  TF32, from compute capability 8.0 on
       float64       float64                  float64

   and the algorithm is chosen by the calls that have taken the place of those that Theano makes.
   Where SYNKHRONOS_DETERMINISTIC is 1 only algorithms are chosen that repeat their results. */
#ifndef SYNKHRONOS_CUDNN_H
#define SYNKHRONOS_CUDNN_H

#include_next <cudnn.h>

#if CUDNN_MAJOR >= 8

#ifndef SYNKHRONOS_TF32
#define SYNKHRONOS_TF32 0
#endif
#ifndef SYNKHRONOS_DETERMINISTIC
#define SYNKHRONOS_DETERMINISTIC 0
#endif

namespace synkhronos {

typedef cudnnConvolutionDescriptor_t Convolution;
typedef cudnnTensorDescriptor_t Tensor;
typedef cudnnFilterDescriptor_t Filter;

static inline cudnnStatus_t set_math(Convolution convolution, Tensor tensor) {
  cudnnDataType_t type;
  int n, dims[CUDNN_DIM_MAX], strides[CUDNN_DIM_MAX];
  cudnnStatus_t status =
      cudnnGetTensorNdDescriptor(tensor, CUDNN_DIM_MAX, &type, &n, dims, strides);
  if (status != CUDNN_STATUS_SUCCESS)
    return status;
  /* CUDNN_DEFAULT_MATH is TF32 for float32. */
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
  if (type == CUDNN_DATA_HALF)
    math = CUDNN_TENSOR_OP_MATH;
  else if (type == CUDNN_DATA_FLOAT && !SYNKHRONOS_TF32)
    math = CUDNN_FMA_MATH;
  return cudnnSetConvolutionMathType(convolution, math);
}

/* The inputs are an image and filters, two images, or filters and an image. */
template <typename B>
cudnnStatus_t set_math(Convolution convolution, Tensor a, B) {
  return set_math(convolution, a);
}

static inline cudnnStatus_t set_math(Convolution convolution, Filter, Tensor b) {
  return set_math(convolution, b);
}

/* cuDNN 9 has a code for each reason. Theano knows the general one: it then takes the algorithm
   that supports everything. */
static inline cudnnStatus_t general(cudnnStatus_t status) {
#if CUDNN_MAJOR >= 9
  if (CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED)
    return CUDNN_STATUS_NOT_SUPPORTED;
#endif
  return status;
}

template <typename Real, typename A, typename B, typename C, typename Algorithm>
cudnnStatus_t workspace_size(Real real, cudnnHandle_t handle, A a, B b, Convolution convolution,
                             C c, Algorithm algorithm, size_t *size) {
  cudnnStatus_t status = set_math(convolution, a, b);
  if (status == CUDNN_STATUS_SUCCESS)
    status = real(handle, a, b, convolution, c, algorithm, size);
  return general(status);
}

template <typename Real, typename A, typename B, typename... Rest>
cudnnStatus_t run(Real real, cudnnHandle_t handle, const void *alpha, A a, const void *of_a, B b,
                  const void *of_b, Convolution convolution, Rest... rest) {
  cudnnStatus_t status = set_math(convolution, a, b);
  if (status != CUDNN_STATUS_SUCCESS)
    return status;
  return real(handle, alpha, a, of_a, b, of_b, convolution, rest...);
}

enum { AT_MOST = 32 }; /* more than there are algorithms, in each math type */

/* Choose the first algorithm that works within the limit; they come with the fastest first. The
   size is asked again, as the one that was found may be of another math type. */
template <typename Size, typename A, typename B, typename C, typename Found>
cudnnStatus_t choose(Size real_size, cudnnHandle_t handle, A a, B b, Convolution convolution, C c,
                     const Found *found, int count, size_t limit, Found *choice) {
  cudnnStatus_t problem = CUDNN_STATUS_NOT_SUPPORTED;
  for (int i = 0; i < count; i++) {
    if (found[i].status != CUDNN_STATUS_SUCCESS)
      continue;
    if (SYNKHRONOS_DETERMINISTIC && found[i].determinism != CUDNN_DETERMINISTIC)
      continue;
    size_t size = 0;
    cudnnStatus_t status =
        workspace_size(real_size, handle, a, b, convolution, c, found[i].algo, &size);
    if (status != CUDNN_STATUS_SUCCESS)
      problem = status;
    else if (size <= limit) {
      *choice = found[i];
      choice->memory = size;
      return CUDNN_STATUS_SUCCESS;
    }
  }
  return problem;
}

template <typename A, typename B, typename C, typename Found, typename Size, typename Algorithm>
cudnnStatus_t guess(cudnnStatus_t (*real)(cudnnHandle_t, A, B, Convolution, C, int, int *, Found *),
                    Size real_size, cudnnHandle_t handle, A a, B b, Convolution convolution, C c,
                    size_t limit, Algorithm *algorithm) {
  Found found[AT_MOST], choice;
  int count = 0;
  cudnnStatus_t status = set_math(convolution, a, b);
  if (status == CUDNN_STATUS_SUCCESS)
    status = real(handle, a, b, convolution, c, AT_MOST, &count, found);
  if (status == CUDNN_STATUS_SUCCESS)
    status = choose(real_size, handle, a, b, convolution, c, found, count, limit, &choice);
  if (status == CUDNN_STATUS_SUCCESS)
    *algorithm = choice.algo;
  return status;
}

template <typename Real, typename Size, typename A, typename B, typename C, typename Found>
cudnnStatus_t find(Real real, Size real_size, cudnnHandle_t handle, A a, const void *of_a, B b,
                   const void *of_b, Convolution convolution, C c, void *of_c, int, int *n_chosen,
                   Found *choice, void *workspace, size_t limit) {
  Found found[AT_MOST];
  int count = 0;
  cudnnStatus_t status = set_math(convolution, a, b);
  if (status == CUDNN_STATUS_SUCCESS)
    status = real(handle, a, of_a, b, of_b, convolution, c, of_c, AT_MOST, &count, found,
                  workspace, limit);
  if (status == CUDNN_STATUS_SUCCESS)
    status = choose(real_size, handle, a, b, convolution, c, found, count, limit, choice);
  *n_chosen = status == CUDNN_STATUS_SUCCESS;
  return status;
}

} // namespace synkhronos

/* A macro is not expanded within itself: there, the names are those of cuDNN's functions. */

#define cudnnConvolutionForward(...) synkhronos::run(cudnnConvolutionForward, __VA_ARGS__)
#define cudnnConvolutionBackwardData(...) synkhronos::run(cudnnConvolutionBackwardData, __VA_ARGS__)
#define cudnnConvolutionBackwardFilter(...) \
  synkhronos::run(cudnnConvolutionBackwardFilter, __VA_ARGS__)

#define cudnnGetConvolutionForwardWorkspaceSize(...) \
  synkhronos::workspace_size(cudnnGetConvolutionForwardWorkspaceSize, __VA_ARGS__)
#define cudnnGetConvolutionBackwardDataWorkspaceSize(...) \
  synkhronos::workspace_size(cudnnGetConvolutionBackwardDataWorkspaceSize, __VA_ARGS__)
#define cudnnGetConvolutionBackwardFilterWorkspaceSize(...) \
  synkhronos::workspace_size(cudnnGetConvolutionBackwardFilterWorkspaceSize, __VA_ARGS__)

#define cudnnFindConvolutionForwardAlgorithmEx(...) \
  synkhronos::find(cudnnFindConvolutionForwardAlgorithmEx, \
                   cudnnGetConvolutionForwardWorkspaceSize, __VA_ARGS__)
#define cudnnFindConvolutionBackwardDataAlgorithmEx(...) \
  synkhronos::find(cudnnFindConvolutionBackwardDataAlgorithmEx, \
                   cudnnGetConvolutionBackwardDataWorkspaceSize, __VA_ARGS__)
#define cudnnFindConvolutionBackwardFilterAlgorithmEx(...) \
  synkhronos::find(cudnnFindConvolutionBackwardFilterAlgorithmEx, \
                   cudnnGetConvolutionBackwardFilterWorkspaceSize, __VA_ARGS__)

/* cuDNN 7 could also choose without a limit; Theano always gives one. */

#define cudnnGetConvolutionForwardAlgorithm(handle, x, w, convolution, y, preference, ...) \
  synkhronos::guess(cudnnGetConvolutionForwardAlgorithm_v7, \
                    cudnnGetConvolutionForwardWorkspaceSize, handle, x, w, convolution, y, \
                    __VA_ARGS__)
#define cudnnGetConvolutionBackwardDataAlgorithm(handle, w, dy, convolution, dx, preference, ...) \
  synkhronos::guess(cudnnGetConvolutionBackwardDataAlgorithm_v7, \
                    cudnnGetConvolutionBackwardDataWorkspaceSize, handle, w, dy, convolution, dx, \
                    __VA_ARGS__)
#define cudnnGetConvolutionBackwardFilterAlgorithm(handle, x, dy, convolution, dw, preference, ...) \
  synkhronos::guess(cudnnGetConvolutionBackwardFilterAlgorithm_v7, \
                    cudnnGetConvolutionBackwardFilterWorkspaceSize, handle, x, dy, convolution, dw, \
                    __VA_ARGS__)

#if CUDNN_MAJOR == 8

/* Recurrent networks. cuDNN 9 has none of the other calls either. */
static inline cudnnStatus_t cudnnSetRNNDescriptor(
    cudnnHandle_t handle, cudnnRNNDescriptor_t rnn, int hidden_size, int num_layers,
    cudnnDropoutDescriptor_t dropout, cudnnRNNInputMode_t input_mode,
    cudnnDirectionMode_t direction, cudnnRNNMode_t mode, cudnnRNNAlgo_t algorithm,
    cudnnDataType_t type) {
  cudnnStatus_t status =
      cudnnSetRNNDescriptor_v6(handle, rnn, hidden_size, num_layers, dropout, input_mode,
                               direction, mode, algorithm, type);
  if (status == CUDNN_STATUS_SUCCESS && type == CUDNN_DATA_FLOAT && !SYNKHRONOS_TF32)
    status = cudnnSetRNNMatrixMathType(rnn, CUDNN_FMA_MATH);
  return status;
}

#endif /* CUDNN_MAJOR == 8 */
#endif /* CUDNN_MAJOR >= 8 */
#endif
