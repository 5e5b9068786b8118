// Package nodes proves that all instances run and no node is cordoned in the end, however the
// node keeper is killed and disturbed. Histories are generated. They have two keepers, a
// cluster whose attacher, kubelets and controllers are played by the proof, and a simulated
// rack without hot-plug, which may get hot-plug, perhaps for attaches alone. Each history
// has a few kinds of disturbances. They happen while the cluster is at rest, during an
// operation, or between two requests of a round. After each act, and at each change that a
// keeper makes, the proof checks the promises. In the end every disturbance is mended, and
// the cluster must come to rest. People mend their own mistakes: an instance that they
// stopped, or a record that they changed.
package nodes
