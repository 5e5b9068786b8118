package keeper

import (
	"errors"
	"fmt"

	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	policyv1 "k8s.io/client-go/kubernetes/typed/policy/v1"
	storagev1 "k8s.io/client-go/kubernetes/typed/storage/v1"
	"k8s.io/client-go/rest"
)

// Cluster contains the Kubernetes clients that this package uses. The clientset of client-go would
// also do, but it contains the clients of all other API groups, too, which are a fifth of the
// keeper's memory.
type Cluster interface {
	CoordinationV1() coordinationv1.CoordinationV1Interface
	CoreV1() corev1.CoreV1Interface
	PolicyV1() policyv1.PolicyV1Interface
	StorageV1() storagev1.StorageV1Interface
}

// clients implements Cluster. The clients share their connections.
type clients struct {
	coordination *coordinationv1.CoordinationV1Client
	core         *corev1.CoreV1Client
	policy       *policyv1.PolicyV1Client
	storage      *storagev1.StorageV1Client
}

func (c *clients) CoordinationV1() coordinationv1.CoordinationV1Interface { return c.coordination }
func (c *clients) CoreV1() corev1.CoreV1Interface                         { return c.core }
func (c *clients) PolicyV1() policyv1.PolicyV1Interface                   { return c.policy }
func (c *clients) StorageV1() storagev1.StorageV1Interface                { return c.storage }

// connect returns the clients of a cluster. They send userAgent as their User-Agent.
func connect(config *rest.Config, userAgent string) (Cluster, error) {
	config = rest.CopyConfig(config)
	config.UserAgent = userAgent
	http, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes client: %w", err)
	}
	var c clients
	var errs [4]error
	c.coordination, errs[0] = coordinationv1.NewForConfigAndClient(config, http)
	c.core, errs[1] = corev1.NewForConfigAndClient(config, http)
	c.policy, errs[2] = policyv1.NewForConfigAndClient(config, http)
	c.storage, errs[3] = storagev1.NewForConfigAndClient(config, http)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("the Kubernetes client: %w", err)
	}
	return &c, nil
}
