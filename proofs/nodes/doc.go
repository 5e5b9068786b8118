// Package nodes proves that in the end all instances run and no node is cordoned, however the node
// keeper is killed and disturbed. It generates histories. Each has two keepers, a cluster whose
// attacher, kubelets and controllers this package simulates, and a simulated rack. The rack begins
// without hot-plug, and may get it later, perhaps for attaches alone. Each history has a few kinds
// of disturbances, which happen while the cluster is at rest, during an operation, or between two
// requests of a round. The proof checks the keeper's promises after each act, and at each change
// that a keeper makes. In the end it repairs every disturbance, and the cluster must come to rest.
// People repair their own mistakes, such as an instance that they stopped.
package nodes
