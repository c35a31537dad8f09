// Regression with errors of Student's t: the rows of y and x are divided over threads.
functions {
  real part_lpdf(array[] real y, int first, int last, matrix x, vector b, real nu, real sigma) {
    return student_t_lpdf(y | nu, x[first:last] * b, sigma);
  }
}
data {
  int n;
  int k;
  int grain;
  array[n] real y;
  matrix[n, k] x;
}
parameters {
  vector[k] b;
  real<lower=0> nu;
  real<lower=0> sigma;
}
model {
  b ~ normal(0, 1);
  nu ~ gamma(2, 0.1);
  sigma ~ normal(0, 1);
  target += reduce_sum(part_lpdf, y, grain, x, b, nu, sigma);
}
