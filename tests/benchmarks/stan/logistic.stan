// The rows of y and x are divided over threads.
functions {
  real part_lpmf(array[] int y, int first, int last, matrix x, vector b) {
    return bernoulli_logit_glm_lpmf(y | x[first:last], 0, b);
  }
}
data {
  int n;
  int k;
  int grain;
  array[n] int y;
  matrix[n, k] x;
}
parameters {
  vector[k] b;
}
model {
  b ~ normal(0, 1);
  target += reduce_sum(part_lpmf, y, grain, x, b);
}
