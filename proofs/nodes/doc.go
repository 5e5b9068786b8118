// Package nodes proves that in the end all instances run and no node is cordoned, however the node
// keeper (package keeper) is killed and disturbed. A random history has two keepers, a simulated
// rack, and a cluster whose attacher, kubelets and controllers this package simulates. The rack
// begins without hot-plug. It may get hot-plug later, perhaps only for attaches. The proof checks
// the keeper's promises after each act, and at each change that a keeper makes. In the end it
// repairs every disturbance, and the cluster must come to rest. People repair their own mistakes,
// such as an instance that they stopped.
package nodes
