// The log density of a Stan program and its gradient, as functions of C.
#include <iostream>
#include <stan/io/array_var_context.hpp>
#include <stan/math/prim/core/init_threadpool_tbb.hpp>
#include <stan/model/model_base.hpp>
#include <string>
#include <vector>

stan::model::model_base &new_model(stan::io::var_context &, unsigned int, std::ostream *);

namespace {

template <typename T>
struct Arrays {
  std::vector<std::string> names;
  std::vector<T> values;
  std::vector<std::vector<size_t>> shapes;

  Arrays(int n, const char **name, const T **value, const int *ndim, const size_t *lengths) {
    for (int i = 0; i < n; i++) {
      size_t size = 1;
      for (int axis = 0; axis < ndim[i]; axis++) size *= lengths[axis];
      names.push_back(name[i]);
      values.insert(values.end(), value[i], value[i] + size);
      shapes.emplace_back(lengths, lengths + ndim[i]);
      lengths += ndim[i];
    }
  }
};

}  // namespace

// Values lie with the first axis fastest, as Stan reads them.
extern "C" void *make_model(int threads, int n_real, const char **real_names,
                            const double **reals, const int *real_ndim, const size_t *real_lengths,
                            int n_int, const char **int_names, const int **ints,
                            const int *int_ndim, const size_t *int_lengths) {
  stan::math::init_threadpool_tbb(threads);
  Arrays<double> r(n_real, real_names, reals, real_ndim, real_lengths);
  Arrays<int> i(n_int, int_names, ints, int_ndim, int_lengths);
  stan::io::array_var_context data(r.names, r.values, r.shapes, i.names, i.values, i.shapes);
  return &new_model(data, 1, &std::cerr);
}

extern "C" int number_of_parameters(void *model) {
  return static_cast<stan::model::model_base *>(model)->num_params_r();
}

extern "C" double evaluate(void *model, int n, const double *at, double *gradient) {
  Eigen::Matrix<stan::math::var, Eigen::Dynamic, 1> q(n);
  for (int i = 0; i < n; i++) q[i] = at[i];
  auto density = static_cast<stan::model::model_base *>(model)->log_prob_jacobian(q, &std::cerr);
  density.grad();
  for (int i = 0; i < n; i++) gradient[i] = q[i].adj();
  double value = density.val();
  stan::math::recover_memory();
  return value;
}
