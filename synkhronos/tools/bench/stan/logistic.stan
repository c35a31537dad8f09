// Logistic regression: the rows of y and x are divided over threads.
functions {
  real part_lpmf(array[] int y, int first, int last, matrix x, real a, vector b) {
    return bernoulli_logit_glm_lpmf(y | x[first:last], a, b);
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
  real a;
  vector[k] b;
}
model {
  a ~ normal(0, 1);
  b ~ normal(0, 1);
  target += reduce_sum(part_lpmf, y, grain, x, a, b);
}
