package deploy_test

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// policed returns the arguments for the chart's network policies, with further values.
func policed(values ...string) []string {
	return with(append(values, "networkPolicy.enabled=true", "networkPolicy.rack.port=8443",
		"networkPolicy.rack.cidrs={192.0.2.10/32,2001:db8::/64}",
		"networkPolicy.apiServer.cidrs={198.51.100.0/24}")...)
}

// rendered lists what the chart has to make of its values. Each key of want is an object's kind and
// name, followed by a path in the object if only that part matters. In a mapping, and in a list of
// items with names, items that are not listed may have any value, and null means that the item does
// not exist. A list of words has to contain the listed words, and no word that begins with a word
// behind "!".
var rendered = []struct {
	name string
	args []string
	want string
}{
	{"D-8 D-43 D-44 the controller is a Deployment of two replicas with the RFD's arguments", nil, `
Deployment/oxide-csi-controller:
  metadata: {labels: {app.kubernetes.io/name: oxide-csi-driver}}
  spec:
    replicas: 2
    selector: &labels
      matchLabels: {app: oxide-csi-controller, app.kubernetes.io/name: oxide-csi-driver}
    strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}
Deployment/oxide-csi-controller spec.template.metadata.labels:
  {app: oxide-csi-controller, app.kubernetes.io/name: oxide-csi-driver}
Deployment/oxide-csi-controller spec.template.spec.containers[oxide-plugin]:
  image: oxidecomputer/oxide-csi-plugin:v0.1.0
  args: [--endpoint=$(CSI_ENDPOINT), --mode=controller]
  env: [{name: CSI_ENDPOINT, value: "unix:///csi/csi.sock"}]
PodDisruptionBudget/oxide-csi-controller spec:
  {maxUnavailable: 1, unhealthyPodEvictionPolicy: AlwaysAllow, selector: *labels}
`},
	{"D-41 the controller's replicas prefer different nodes", nil, `
Deployment/oxide-csi-controller spec.template.spec.priorityClassName: system-cluster-critical
Deployment/oxide-csi-controller spec.template.spec.affinity.podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm: {topologyKey: kubernetes.io/hostname,
        labelSelector: {matchLabels: {app: oxide-csi-controller}}}
`},
	{"D-41 the controller's replicas need different nodes on request",
		with("controller.antiAffinity=required"), `
Deployment/oxide-csi-controller spec.template.spec.affinity.podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution: null
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector: {matchLabels: {app: oxide-csi-controller}}
`},
	{"the controller's replicas may share a node on request", with("controller.antiAffinity=none"), `
Deployment/oxide-csi-controller spec.template.spec.affinity: null
`},
	{"D-10 D-46 D-47 D-48 B-46 the controller's sidecars share its socket and wait less than a lease",
		everything(), `
Deployment/oxide-csi-controller spec.template.spec:
  volumes: [{name: socket-dir, emptyDir: {}}]
  containers:
    - {name: oxide-plugin, volumeMounts: &mounts [{name: socket-dir, mountPath: /csi}]}
    - name: csi-provisioner
      volumeMounts: *mounts
      args: [--csi-address=/csi/csi.sock, --leader-election=true,
        --leader-election-lease-duration=45s, --timeout=30s, --kube-api-qps=20,
        --extra-create-metadata=true, --default-fstype=ext4]
    - name: csi-attacher
      volumeMounts: *mounts
      args: &args [--csi-address=/csi/csi.sock, --leader-election=true,
        --leader-election-lease-duration=45s, --timeout=30s,
        --kube-api-qps=20]
    - {name: csi-snapshotter, volumeMounts: *mounts, args: *args}
`},
	// CSI's Probe fails for reasons that no restart removes, so the liveness probe uses another
	// socket.
	{"D-11 D-49 kubelet restarts a driver that is stuck and sees that one cannot work", nil, `
Deployment/oxide-csi-controller spec.template.spec: &probed
  volumes: [{name: liveness-dir, emptyDir: {}}]
  containers:
    - name: oxide-plugin
      startupProbe: &asked {httpGet: {path: /healthz, port: 9808}}
      livenessProbe: *asked
      readinessProbe: {exec: {command: [/oxide-csi-plugin, ready]}, timeoutSeconds: 5}
      env: [{name: OXIDE_LIVENESS_ENDPOINT, value: "unix:///liveness/liveness.sock"}]
      volumeMounts: &live [{name: liveness-dir, mountPath: /liveness, readOnly: null}]
    - name: liveness-probe
      args: [--csi-address=/liveness/liveness.sock, "--http-endpoint=:9808"]
      volumeMounts: *live
DaemonSet/oxide-csi-node spec.template.spec: *probed
`},
	{"D-9 D-50 the node is a DaemonSet on every node with the RFD's arguments", nil, `
DaemonSet/oxide-csi-node spec:
  selector: {matchLabels: {app: oxide-csi-node, app.kubernetes.io/name: oxide-csi-driver}}
  updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1}}
  template:
    metadata: {labels: {app: oxide-csi-node, app.kubernetes.io/name: oxide-csi-driver}}
    spec:
      tolerations: [{operator: Exists}]
      priorityClassName: system-node-critical
      initContainers: null # a rack's guest knows its instance
      containers:
        - name: oxide-plugin
          image: oxidecomputer/oxide-csi-plugin-node:v0.1.0
          args: [--endpoint=$(CSI_ENDPOINT), --mode=node]
DaemonSet/oxide-csi-node spec.template.spec.containers[oxide-plugin].env[OXIDE_HOST]: null
DaemonSet/oxide-csi-node spec.template.spec.containers[oxide-plugin].env[OXIDE_TOKEN]: null
`},
	{"D-51 D-53 B-19 the node sees kubelet's directories, wherever they are, and the devices",
		with("node.kubeletDir=/opt/kubelet"), `
DaemonSet/oxide-csi-node spec.template.spec:
  volumes:
    - {name: kubelet-dir, hostPath: {path: /opt/kubelet, type: Directory}}
    - {name: plugin-dir, hostPath: {path: /opt/kubelet/plugins/csi.oxide.computer/,
       type: DirectoryOrCreate}}
    - {name: registration-dir, hostPath: {path: /opt/kubelet/plugins_registry/}}
    - {name: device-dir, hostPath: {path: /dev, type: Directory}}
    - {name: state-dir, hostPath: {path: /run/csi.oxide.computer, type: DirectoryOrCreate}}
  containers:
    - name: oxide-plugin
      env: [{name: OXIDE_STATE_DIR, value: /run/csi.oxide.computer}]
      volumeMounts:
        - {name: kubelet-dir, mountPath: /opt/kubelet, mountPropagation: Bidirectional}
        - {name: plugin-dir, mountPath: /csi}
        - {name: device-dir, mountPath: /dev}
        - {name: state-dir, mountPath: /run/csi.oxide.computer}
    - name: node-driver-registrar
      args: [--kubelet-registration-path=/opt/kubelet/plugins/csi.oxide.computer/csi.sock]
      volumeMounts:
        - {name: plugin-dir, mountPath: /csi}
        - {name: registration-dir, mountPath: /registration}
`},
	{"D-66 D-67 the instance's id comes by file", with("instanceMetadata.enabled=true"), `
DaemonSet/oxide-csi-node spec.template.spec:
  initContainers:
    - name: oxide-instance-metadata
      image: oxidecomputer/oxide-k8s-instance-metadata:v0.1.0
      env: [{name: K8S_NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
      volumeMounts: &data [{name: oxide-instance-metadata, mountPath: /data}]
  containers:
    - name: oxide-plugin
      volumeMounts: *data
      env: [{name: OXIDE_INSTANCE_METADATA_FILE, value: /data/config.env}]
`},
	{"D-67 the instance's id comes by variable",
		with("instanceMetadata.enabled=true", "instanceMetadata.via=env"), `
DaemonSet/oxide-csi-node spec.template.spec.containers[oxide-plugin]:
  env: [{name: OXIDE_INSTANCE_ID, valueFrom: {fileKeyRef: {path: config.env, key: OXIDE_INSTANCE_ID,
    volumeName: oxide-instance-metadata}}}]
? DaemonSet/oxide-csi-node
  spec.template.spec.containers[oxide-plugin].volumeMounts[oxide-instance-metadata]
: null
`},
	{"D-55 B-47 the CSIDriver tells Kubernetes what the driver can", nil, `
CSIDriver/csi.oxide.computer:
  metadata: {labels: {app.kubernetes.io/name: oxide-csi-driver}}
  spec: {attachRequired: true, podInfoOnMount: false, fsGroupPolicy: File, seLinuxMount: true,
    storageCapacity: false, volumeLifecycleModes: [Persistent],
    nodeAllocatableUpdatePeriodSeconds: 60}
`},
	{"B-47 Kubernetes 1.32 gets no field that it refuses", []string{"--kube-version", "1.32.0"}, `
CSIDriver/csi.oxide.computer spec:
  {nodeAllocatableUpdatePeriodSeconds: null, preventPodSchedulingIfMissing: null}
`},
	{"the scheduler of Kubernetes 1.37 waits for the driver, unless the user forbids it",
		[]string{"--kube-version", "1.37.0"}, `
CSIDriver/csi.oxide.computer spec.preventPodSchedulingIfMissing: true
`},
	{"the fields of the CSIDriver can be switched off", append(with("csiDriver.seLinuxMount=false",
		"csiDriver.preventPodSchedulingIfMissing=false"), "--kube-version", "1.37.0"), `
CSIDriver/csi.oxide.computer spec: {seLinuxMount: false, preventPodSchedulingIfMissing: null}
`},
	{"a sidecar without the gate of group snapshots does not get it", append(everything(),
		with("snapshotter.featureGates=null")...), `
Deployment/oxide-csi-controller spec.template.spec.containers[csi-snapshotter].args:
  [--extra-create-metadata=true, "!--feature-gates"]
`},
	{"the snapshotter's gates are the user's", append(everything(),
		with("snapshotter.featureGates.ReleaseLeaderElectionOnExit=true")...), `
Deployment/oxide-csi-controller spec.template.spec.containers[csi-snapshotter].args:
  ["--feature-gates=CSIVolumeGroupSnapshot=false,ReleaseLeaderElectionOnExit=true"]
`},
	{"a storage class has the user's labels and topologies", append(with("topology=rack=a"),
		"--set-json", `storageClass={"labels": {"tier": "fast"}, "allowedTopologies": [
		{"matchLabelExpressions": [{"key": "topology.csi.oxide.computer/rack", "values": ["a"]}]}]}`), `
StorageClass/oxide-disk metadata.labels: {tier: fast, app.kubernetes.io/name: oxide-csi-driver}
StorageClass/oxide-disk allowedTopologies:
  [{matchLabelExpressions: [{key: topology.csi.oxide.computer/rack, values: [a]}]}]
`},
	{"snapshot classes have the user's labels, such as Velero's", []string{"--set-json",
		`snapshots={"enabled": true, "class": {"labels": {"a": "b"}, "annotations": {"c": "d"},
		"parameters": {"csi.storage.k8s.io/snapshotter-secret-name": "s"}}, "classes": [
		{"name": "velero", "default": true, "deletionPolicy": "Retain",
		"labels": {"velero.io/csi-volumesnapshot-class": "true"}}]}`}, `
VolumeSnapshotClass/oxide-snapshot:
  metadata: {labels: {a: b}, annotations: {c: d}}
  driver: csi.oxide.computer
  deletionPolicy: Delete
  parameters: {csi.storage.k8s.io/snapshotter-secret-name: s}
VolumeSnapshotClass/velero:
  metadata:
    labels: {velero.io/csi-volumesnapshot-class: "true", app.kubernetes.io/name: oxide-csi-driver}
    annotations: {snapshot.storage.kubernetes.io/is-default-class: "true"}
  driver: csi.oxide.computer
  deletionPolicy: Retain
  parameters: null
`},
	{"further snapshot classes can do without the first", with("snapshots.enabled=true",
		"snapshots.class.create=false", "snapshots.classes[0].name=mine"), `
VolumeSnapshotClass/oxide-snapshot: null
VolumeSnapshotClass/mine deletionPolicy: Delete
`},
	{"accounts and roles can be the user's own", append(audited(), append(everything(),
		with("serviceAccount.create=false", "rbac.create=false", "controller.serviceAccountName=c",
			"node.serviceAccountName=n", "nodeKeeper.serviceAccountName=k",
			"audit.serviceAccountName=a")...)...), `
Deployment/oxide-csi-controller spec.template.spec.serviceAccountName: c
DaemonSet/oxide-csi-node spec.template.spec.serviceAccountName: "n"
Deployment/oxide-csi-node-keeper spec.template.spec.serviceAccountName: k
CronJob/oxide-csi-audit spec.jobTemplate.spec.template.spec.serviceAccountName: a
`},
	{"the chart's accounts and bindings have the user's names", with("controller.serviceAccountName=c",
		"controller.serviceAccountAnnotations.a=b"), `
ServiceAccount/oxide-csi-controller: null
ServiceAccount/c metadata.annotations: {a: b}
ClusterRoleBinding/oxide-csi-controller:
  roleRef: {kind: ClusterRole, name: oxide-csi-controller}
  subjects: [{name: c, namespace: oxide-csi}]
RoleBinding/oxide-csi-controller:
  metadata: {namespace: oxide-csi}
  roleRef: {kind: Role, name: oxide-csi-controller}
  subjects: [{name: c, namespace: oxide-csi}]
`},
	{"the controller can use the node's network and other name servers", []string{"--set-json",
		`controller={"hostNetwork": true, "antiAffinity": "required", "dnsPolicy": "None",
		"dnsConfig": {"nameservers": ["192.0.2.53"], "options": [{"name": "ndots", "value": "1"}]}}`}, `
Deployment/oxide-csi-controller spec.template.spec:
  hostNetwork: true
  dnsPolicy: None
  dnsConfig: {nameservers: [192.0.2.53], options: [{name: ndots, value: "1"}]}
DaemonSet/oxide-csi-node spec.template.spec.hostNetwork: null
`},
	{"helm test has a pod of the user's image that takes its volume with it", with("test.enabled=true",
		"test.image.repository=mine", "test.image.tag=v1", "resources.test.requests.cpu=1",
		"storageClass.name=fast"), `
Pod/oxide-csi-test:
  metadata: {annotations: {helm.sh/hook: test,
    helm.sh/hook-delete-policy: "before-hook-creation,hook-succeeded"}}
  spec:
    containers:
      - {name: test, image: "mine:v1", volumeMounts: [{name: data, mountPath: /data}],
         resources: {requests: {cpu: 1}}}
    volumes: [{name: data, ephemeral: {volumeClaimTemplate: {spec: {storageClassName: fast}}}}]
`},
	{"helm test uses the class of one's choice", with("test.enabled=true",
		"test.image.repository=mine", "test.image.digest=sha256:"+strings.Repeat("0", 64),
		"test.storageClassName=slow"), `
Pod/oxide-csi-test spec.volumes:
  [{name: data, ephemeral: {volumeClaimTemplate: {spec: {storageClassName: slow}}}}]
`},
	{"D-56 D-60 EX-1 claims name the class oxide-disk or a further one", with(
		"extraStorageClasses[0].name=oxide-xfs", "extraStorageClasses[0].parameters.blockSize=512",
		"extraStorageClasses[0].default=true"), `
StorageClass/oxide-disk: &class {provisioner: csi.oxide.computer, allowVolumeExpansion: false,
  reclaimPolicy: Delete, volumeBindingMode: WaitForFirstConsumer}
StorageClass/oxide-disk parameters: null
StorageClass/oxide-disk metadata.annotations: null
StorageClass/oxide-xfs: *class
StorageClass/oxide-xfs parameters: {blockSize: "512"}
StorageClass/oxide-xfs metadata.annotations: {storageclass.kubernetes.io/is-default-class: "true"}
`},
	{"D-72 D-74 E-22 controller and nodes get one topology",
		with(`topology=rack=a\,zone=b`, `topologyAlso=rack=c\,zone=b`), `
DaemonSet/oxide-csi-node spec.template.spec.containers[oxide-plugin].env:
  [{name: OXIDE_TOPOLOGY, value: "rack=a,zone=b"}]
Deployment/oxide-csi-controller spec.template.spec.containers[oxide-plugin].env:
  [{name: OXIDE_TOPOLOGY, value: "rack=a,zone=b;rack=c,zone=b"}]
Deployment/oxide-csi-controller spec.template.spec.containers[csi-provisioner].args:
  ["!--strict-topology", "!--immediate-topology"]
`},
	{"D-61 volumes that stay need nodes that report their instance",
		with("topologyInstance=true", "storageClass.parameters.placement=instance"), `
DaemonSet/oxide-csi-node spec.template.spec.containers[oxide-plugin].env: &reported
  [{name: OXIDE_TOPOLOGY_INSTANCE, value: "true"}]
Deployment/oxide-csi-controller spec.template.spec.containers[oxide-plugin].env: *reported
Deployment/oxide-csi-controller spec.template.spec.containers[csi-provisioner].args:
  [--strict-topology=true, --immediate-topology=false]
`},
	{"D-61 volumes that move are created at once beside nodes that report their instance",
		with("topologyInstance=true", "topology=rack=a"), `
Deployment/oxide-csi-controller spec.template.spec.containers[csi-provisioner].args:
  [--strict-topology=true, "!--immediate-topology"]
`},
	{"E-22 by default there is no topology, Secret, metrics, alert, policy, audit or node keeper",
		with("metrics.enabled=false"), `
Deployment/oxide-csi-controller spec.template.spec.containers[oxide-plugin]: &bare {ports: null}
? Deployment/oxide-csi-controller
  spec.template.spec.containers[oxide-plugin].env[OXIDE_TOPOLOGY]
: null
DaemonSet/oxide-csi-node spec.template.spec.containers[oxide-plugin]: *bare
DaemonSet/oxide-csi-node spec.template.spec.containers[oxide-plugin].env[OXIDE_TOPOLOGY]: null
Secret/oxide-secret: null
PodMonitor/oxide-csi-driver: null
PrometheusRule/oxide-csi-driver: null
ConfigMap/oxide-csi-dashboard: null
NetworkPolicy/oxide-csi-controller: null
NetworkPolicy/oxide-csi-node: null
CronJob/oxide-csi-audit: null
Pod/oxide-csi-test: null
Deployment/oxide-csi-node-keeper: null
ClusterRole/oxide-csi-node-keeper: null
ClusterRole/oxide-csi-node: null
ClusterRole/oxide-csi-node-leave: null
`},
	{"metrics have ports of controller and node, and a PodMonitor",
		with("metrics.enabled=true", "metrics.podMonitor=true", "metrics.podMonitorInterval=30s",
			"metrics.podMonitorRelabelings[0].targetLabel=rack",
			"metrics.podMonitorRelabelings[0].replacement=a"), `
Deployment/oxide-csi-controller spec.template.spec.containers[oxide-plugin]:
  env: [{name: OXIDE_METRICS_ADDRESS, value: "0.0.0.0:9809"}]
  ports: [{name: metrics, containerPort: 9809}]
DaemonSet/oxide-csi-node spec.template.spec.containers[oxide-plugin]:
  env: [{name: OXIDE_METRICS_ADDRESS, value: "0.0.0.0:9810"}]
  ports: [{name: metrics, containerPort: 9810}]
PodMonitor/oxide-csi-driver spec:
  selector: {matchLabels: {app.kubernetes.io/name: oxide-csi-driver}}
  podMetricsEndpoints:
    - {port: metrics, interval: 30s, relabelings: &rack [{targetLabel: rack, replacement: a}]}
    - {port: provisioner, interval: 30s, relabelings: *rack}
    - {port: attacher, interval: 30s, relabelings: *rack}
    - {port: snapshotter, interval: 30s, relabelings: *rack}
`},
	{"D-45 the Secret is made on request, with keys of one's own", with("secret.create=true",
		"secret.host=https://rack", "secret.token=hush", "secret.project=p", "ownCA=true",
		"secret.caBundle=PEM", "secret.keys.host=oxide-host"), `
Secret/oxide-secret stringData:
  {oxide-host: "https://rack", token: hush, project: p, ca.crt: PEM}
`},
	{"strategies and spreading are the user's", []string{"--set-json", `controller={
		"updateStrategy": {"type": "Recreate"}, "priorityClassName": "", "topologySpreadConstraints": [
		{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
		{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway",
		"labelSelector": {"matchLabels": {"mine": "true"}}}]}`, "--set-json",
		`node={"updateStrategy": {"type": "OnDelete"}, "priorityClassName": ""}`}, `
Deployment/oxide-csi-controller spec:
  strategy: {type: Recreate, rollingUpdate: null}
Deployment/oxide-csi-controller spec.template.spec:
  priorityClassName: null
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: zone
      whenUnsatisfiable: DoNotSchedule
      labelSelector: {matchLabels: {app: oxide-csi-controller}}
    - maxSkew: 2
      topologyKey: rack
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: {matchLabels: {app: oxide-csi-controller, mine: "true"}}
DaemonSet/oxide-csi-node spec:
  updateStrategy: {type: OnDelete, rollingUpdate: null}
DaemonSet/oxide-csi-node spec.template.spec.priorityClassName: null
`},
	{"no two node keepers share a node", kept(), `
Deployment/oxide-csi-node-keeper spec:
  replicas: 2
  selector: {matchLabels: {app: oxide-csi-node-keeper}}
  strategy: {rollingUpdate: {maxSurge: 0}}
Deployment/oxide-csi-node-keeper spec.template.spec.affinity.podAntiAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector: {matchLabels: {app: oxide-csi-node-keeper}}
PodDisruptionBudget/oxide-csi-node-keeper spec:
  {maxUnavailable: 1, unhealthyPodEvictionPolicy: AlwaysAllow,
    selector: {matchLabels: {app: oxide-csi-node-keeper}}}
`},
	{"the node keeper's pods learn their node and namespace, and are probed", kept(), `
Deployment/oxide-csi-node-keeper spec.template.spec:
  priorityClassName: system-cluster-critical
  containers:
    - name: oxide-node-keeper
      image: oxidecomputer/oxide-node-keeper:v0.1.0
      args: ["--http-endpoint=:9815"]
      livenessProbe: {httpGet: {path: /healthz, port: 9815}}
      env:
        - {name: K8S_NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: K8S_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
`},
	{"the node keeper's budget can be left out", kept("nodeKeeper.podDisruptionBudget=false"), `
PodDisruptionBudget/oxide-csi-node-keeper: null
`},
	// When the registrar ends, kubelet forgets the driver and no longer unmounts. So the program
	// beside the driver has to end first, then the hook, and then a minute is left.
	{"a node that goes keeps its driver", kept("nodeKeeper.leavingNodes.gracePeriodSeconds=300"), `
DaemonSet/oxide-csi-node spec.template.spec:
  terminationGracePeriodSeconds: 300
  volumes: [{name: leaving, emptyDir: {}}]
  initContainers: [{name: node-driver-registrar, restartPolicy: Always}]
  containers:
    - name: oxide-plugin
      env: [{name: OXIDE_LEAVE_SOCKET, value: /leaving/leave.sock}]
      volumeMounts: &leave [{name: leaving, mountPath: /leaving}]
      lifecycle: {preStop: {exec: {command: [/oxide-csi-plugin, prestop, --timeout=245s]}}}
    - name: leave
      image: oxidecomputer/oxide-node-keeper:v0.1.0
      args: [leave, --timeout=240s]
      env: [{name: K8S_NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
      volumeMounts: *leave
`},
	{"a network policy lets through what controller and node need", policed("metrics.enabled=true"), `
NetworkPolicy/oxide-csi-controller spec:
  podSelector:
    matchLabels: {app.kubernetes.io/name: oxide-csi-driver}
    matchExpressions:
      - {key: app, operator: In, values: [oxide-csi-controller, oxide-csi-audit]}
  policyTypes: [Ingress, Egress]
  ingress: [{ports: [{port: 9809}, {port: 9812}, {port: 9813}, {port: 9814}]}]
  egress:
    - {to: [{ipBlock: {cidr: 192.0.2.10/32}}, {ipBlock: {cidr: "2001:db8::/64"}}],
       ports: [{port: 8443}]}
    - {to: [{ipBlock: {cidr: 198.51.100.0/24}}], ports: [{port: 6443}]}
    - {ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]}
NetworkPolicy/oxide-csi-node spec:
  podSelector: {matchLabels: {app: oxide-csi-node, app.kubernetes.io/name: oxide-csi-driver}}
  policyTypes: [Ingress, Egress]
  ingress: [{ports: [{port: 9810}]}]
  egress: []
`},
	{"a network policy lets a node that reads its Node ask Kubernetes",
		policed("instanceMetadata.enabled=true"), `
NetworkPolicy/oxide-csi-node spec.egress:
  [{to: [{ipBlock: {cidr: 198.51.100.0/24}}], ports: [{port: 6443}]}]
`},
	{"a network policy lets the node keeper, and nodes that may go, ask Kubernetes",
		policed("nodeKeeper.enabled=true", "networkPolicy.metricsFrom[0].podSelector.a=b",
			"metrics.enabled=true"), `
NetworkPolicy/oxide-csi-node spec:
  ingress: [{ports: [{port: 9810}], from: &from [{podSelector: {a: b}}]}]
  egress: [&asks {to: [{ipBlock: {cidr: 198.51.100.0/24}}], ports: [{port: 6443}]}]
NetworkPolicy/oxide-csi-node-keeper spec:
  podSelector: {matchLabels: {app: oxide-csi-node-keeper}}
  ingress: [{ports: [{port: 9815}], from: *from}]
  egress:
    - {to: [{ipBlock: {cidr: 192.0.2.10/32}}, {ipBlock: {cidr: "2001:db8::/64"}}],
       ports: [{port: 8443}]}
    - *asks
    - {ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]}
`},
	{"a network policy without metrics lets nothing in", policed("metrics.enabled=false"), `
NetworkPolicy/oxide-csi-controller spec: &closed {policyTypes: [Ingress], ingress: []}
NetworkPolicy/oxide-csi-node spec: *closed
`},
	// Exit status 2 means that the audit found something, so another attempt would find it again.
	{"an audit compares the cluster's volumes with the rack, once", audited(), `
CronJob/oxide-csi-audit spec:
  {schedule: 17 3 * * *, concurrencyPolicy: Forbid, jobTemplate: {spec: {backoffLimit: 0}}}
CronJob/oxide-csi-audit spec.jobTemplate.spec.template.spec:
  restartPolicy: Never
  serviceAccountName: oxide-csi-audit
  initContainers:
    - name: list
      image: mine/kubectl:v1.35.4
      volumeMounts: [{name: lists, mountPath: /lists}]
  containers:
    - name: audit
      image: oxidecomputer/oxide-csi-plugin:v0.1.0
      args: [audit, --volumes=/lists/wanted.json, --output=json]
      volumeMounts: [{name: lists, mountPath: /lists, readOnly: true}]
`},
}

func TestTheChartRendersItsValues(t *testing.T) {
	for _, c := range short.Some(t, 20, rendered) {
		t.Run(c.name, func(t *testing.T) {
			all := map[string]any{}
			for _, o := range objects(t, c.args...) {
				all[o.GetKind()+"/"+o.GetName()] = o.Object
			}
			var want map[string]any
			if err := yaml.UnmarshalStrict([]byte(c.want), &want); err != nil || len(want) == 0 {
				t.Fatalf("the row wants %v: %v", want, err)
			}
			for where, part := range want {
				object, path, _ := strings.Cut(where, " ")
				got := all[object]
				for _, step := range steps.FindAllString("."+path, -1) {
					got = named(got)[step]
				}
				for _, fault := range faults(where, part, got) {
					t.Error(fault)
				}
			}
		})
	}
}

// steps matches the steps of a path, in the form that named writes.
var steps = regexp.MustCompile(`\.[^.[]+|\[[^]]+\]`)

// faults returns the places at which got is not as want requires.
func faults(path string, want, got any) []string {
	var found []string
	fault := func(want any) {
		found = append(found, fmt.Sprintf("%s is %v, want %v", path, got, want))
	}
	words, isList := want.([]any)
	if parts := named(want); parts != nil && (!isList || len(words) > 0) {
		for _, k := range slices.Sorted(maps.Keys(parts)) {
			found = append(found, faults(path+k, parts[k], named(got)[k])...)
		}
		if got == nil {
			fault(want)
		}
	} else if list, ok := got.([]any); ok && allWords(words) {
		for _, word := range words {
			unwanted, not := strings.CutPrefix(word.(string), "!")
			if slices.ContainsFunc(list, func(item any) bool {
				return !not && item == word || not && strings.HasPrefix(fmt.Sprint(item), unwanted)
			}) == not {
				fault(word)
			}
		}
	} else if !reflect.DeepEqual(want, got) {
		fault(want)
	}
	return found
}

// allWords reports whether there is at least one item and all items are strings.
func allWords(items []any) bool {
	return len(items) > 0 && !slices.ContainsFunc(items, func(item any) bool {
		_, word := item.(string)
		return !word
	})
}

func TestARowThatTheChartDoesNotFulfilIsReported(t *testing.T) {
	got := map[string]any{"a": "b", "l": []any{map[string]any{"name": "n", "v": 1.0}},
		"w": []any{"--x=1"}}
	for _, want := range []string{"{a: c}", "{a: null}", "{b: {}}", "{l: [{name: n, v: 2}]}",
		"{l: [{name: m}]}", "{w: [--y]}", `{w: ["!--x"]}`, "{w: null}", "{l: []}", "{e: []}"} {
		var part any
		if err := yaml.Unmarshal([]byte(want), &part); err != nil {
			t.Fatal(err)
		}
		if len(faults("", part, got)) == 0 {
			t.Errorf("%s is found in %v", want, got)
		}
	}
}

func TestWithoutAccountsAndRolesTheChartCreatesNone(t *testing.T) {
	args := append(audited(), everything()...)
	for value, kinds := range map[string][]string{
		"serviceAccount.create=false": {"ServiceAccount"},
		"rbac.create=false":           {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"},
	} {
		all, without := objects(t, args...), objects(t, append(with(value), args...)...)
		for _, kind := range kinds {
			if len(all.kinds(kind)) == 0 || len(without.kinds(kind)) != 0 {
				t.Errorf("with %s there are %d objects of the kind %s, without it %d", value,
					len(without.kinds(kind)), kind, len(all.kinds(kind)))
			}
			all = slices.DeleteFunc(all, func(o *unstructured.Unstructured) bool {
				return o.GetKind() == kind
			})
		}
		if diff := cmp.Diff(all.byKey(t), without.byKey(t)); diff != "" {
			t.Errorf("%s changes other objects, too:\n%s", value, diff)
		}
	}
}
