// A linear model with an intercept for each group: rows are divided over threads.
functions {
  real part_lpdf(array[] real y, int first, int last, array[] int g, vector x, vector a, real b,
                 real sigma) {
    return normal_lpdf(y | a[g[first:last]] + b * x[first:last], sigma);
  }
}
data {
  int n;
  int k;
  int grain;
  array[n] int<lower=1, upper=k> g;
  array[n] real y;
  vector[n] x;
}
parameters {
  real b;
  real mu;
  real<lower=0> tau;
  vector[k] effect;
  real<lower=0> sigma;
}
model {
  b ~ normal(0, 1);
  mu ~ normal(0, 1);
  tau ~ normal(0, 1);
  effect ~ normal(0, 1);
  sigma ~ normal(0, 1);
  target += reduce_sum(part_lpdf, y, grain, g, x, mu + tau * effect, b, sigma);
}
