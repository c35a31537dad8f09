// Hierarchical linear model: an intercept and a slope for each group, rows divided over threads.
functions {
  real part_lpdf(array[] real y, int first, int last, array[] int g, vector x, vector a, vector b,
                 real sigma) {
    return normal_lpdf(y | a[g[first:last]] + b[g[first:last]] .* x[first:last], sigma);
  }
}
data {
  int n;
  int n_groups;
  int grain;
  array[n] int<lower=1, upper=n_groups> g;
  array[n] real y;
  vector[n] x;
}
parameters {
  real mu_a;
  real mu_b;
  real<lower=0> tau_a;
  real<lower=0> tau_b;
  real<lower=0> sigma;
  vector[n_groups] a;
  vector[n_groups] b;
}
model {
  mu_a ~ normal(0, 1);
  mu_b ~ normal(0, 1);
  tau_a ~ normal(0, 1);
  tau_b ~ normal(0, 1);
  sigma ~ normal(0, 1);
  a ~ normal(mu_a, tau_a);
  b ~ normal(mu_b, tau_b);
  target += reduce_sum(part_lpdf, y, grain, g, x, a, b, sigma);
}
